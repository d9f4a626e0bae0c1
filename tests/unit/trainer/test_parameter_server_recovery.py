"""What a manager that was started anew knows, and tells the leader: each complete step once."""

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Synchronization
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.protocol.progress import TaskProgress
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.server.recovery import Recovery
from disttrain_trainer.parameter_server.server.scheduler import TaskScheduler

RESULT = (1.0, 1.0, 1.0)


def begun():
    tasks = TaskScheduler(2, 3, Synchronization.ASYNC, 0, 5.0)
    tasks.start(Sampler(50, 1, Batch(micro=2, accumulation=1, world=4), 2), 0, Cursor(), 3, 0.0)
    return tasks


def test_a_complete_step_is_in_the_table_until_the_leader_knows_it():
    tasks = begun()
    for part in range(2):
        tasks.mark_complete(Task(0, part), RESULT)
    assert set(tasks.known().done) == {Task(0, 0), Task(0, 1)}
    tasks.acknowledge(1)
    assert not tasks.known().done


def test_what_a_worker_knows_the_leader_knows_is_sent_no_more():
    tasks = begun()
    tasks.merge(TaskProgress(0, 1, Cursor(0, 4), 3, 1))
    for part in range(2):
        tasks.mark_complete(Task(0, part), RESULT)
    assert tasks.floor == 1
    assert tasks.results == []


def test_a_task_of_work_that_has_not_begun_here_is_lent_again():
    tasks = TaskScheduler(2, 3, Synchronization.ASYNC, 0, 5.0)
    assert not tasks.complete(1, Task(0, 0), RESULT)
    assert tasks.floor == 0


def test_without_anybody_who_knows_the_leader_is_waited_for():
    """It alone knows whether the work has begun: nobody else would say so later."""
    recovery = Recovery(3, 5.0, None)
    recovery.add_report(1, None, None, 0.0)
    assert not recovery.over(10 * 5.0)
    recovery.add_report(0, None, None, 10 * 5.0)
    assert recovery.over(10 * 5.0)
    knows = Recovery(3, 5.0, None)
    knows.add_report(1, TaskProgress(0, 0, Cursor(), 3, 0), None, 0.0)
    assert knows.over(2 * 5.0)
