"""What a manager that was started anew knows, and tells the leader: each complete step once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Synchronization
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.protocol.progress import TaskProgress, progress_of
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task
from disttrain_trainer.parameter_server.protocol.wire import Malformed
from disttrain_trainer.parameter_server.server.recovery import Recovery
from disttrain_trainer.parameter_server.server.scheduler import TaskScheduler

RESULT = Result(1.0, 1.0, 1.0)


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


def result(worker):
    return Result(float(worker), 1.0, 1.0, worker, worker)


knowledge = st.builds(
    lambda floor, hold_at, announced, done, clocks, skipped: TaskProgress(
        0,
        floor,
        Cursor(floor, 0),
        hold_at,
        announced,
        {Task(*one): result(one[1]) for one in done if one[0] >= announced},
        clocks,
        skipped,
    ),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 5),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 2))),
    st.dictionaries(st.integers(0, 2), st.integers(0, 9)),
    st.integers(0, 3),
)


class TestWhatIsKnown:
    @settings(deadline=None)
    @given(knowledge, knowledge, knowledge)
    def test_the_order_of_reports_does_not_count_nor_that_one_comes_twice(self, one, two, three):
        assert one.join(two) == two.join(one)
        assert one.join(two).join(three) == one.join(two.join(three))
        assert one.join(two).join(two) == one.join(two)

    @settings(deadline=None)
    @given(knowledge)
    def test_what_is_sent_arrives(self, known):
        assert progress_of(json.loads(json.dumps(known.fields()))) == known

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            ({"floor": -1}, "`floor` of report is -1"),
            ({"done": None}, "lacks its lists"),
            ({"done": [[1]]}, "1 numbers, expected a step and a part"),
            ({"done": [[1, 2, "x", 0, 0]]}, "`loss` of report is 'x'"),
            ({"done": [[1, 2, 0, 0, 0, 0, -1]]}, "`in_row` of report is -1"),
            ({"skipped": "3"}, "`skipped` of report is '3'"),
            ({"done": [7]}, "a task of a report is 7"),
            ({"clocks": {}}, "lacks its lists"),
            (None, "expected an object"),
        ],
    )
    def test_nonsense_is_malformed(self, wrong, why):
        """Red without the guard that each reason belongs to."""
        fields = TaskProgress(0, 1, Cursor(0, 2), 3, 1).fields()
        with pytest.raises(Malformed, match=why):
            progress_of(wrong and fields | wrong)

    def test_a_snapshot_of_a_former_version_says_nothing_of_skipped_tasks(self):
        known = TaskProgress(0, 1, Cursor(0, 2), 3, 1, {Task(1, 0): Result(1.0, 2.0, 3.0)})
        fields = known.fields() | {"done": [[1, 0, 1.0, 2.0, 3.0]]}
        del fields["skipped"]
        assert progress_of(fields) == known
