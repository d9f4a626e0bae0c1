"""What Prometheus gets: counted from changes of statuses, without a name of a job."""

import json
from collections.abc import Callable

import pytest

from disttrain_api.status import (
    Attempt,
    Condition,
    FailureClass,
    Goodput,
    GoodputState,
    JobStatus,
    Progress,
    Replacement,
    StateSeconds,
    Verdict,
)
from disttrain_operator.metrics import Figures, Metrics
from disttrain_operator.transitions import PhaseClock, Ran, Restarted, happenings

SLOW = Condition(
    type="Straggling", status="True", reason="RankSlow", message="rank 1 is slow", last_transition_time="",
    observed_generation=1,
)  # fmt: skip

SKIPPED = Progress(step=5, total_steps=9, skipped_steps=3, roll_backs=1, update_time="")
HANGS = SLOW.model_copy(update={"type": "HangSuspected", "reason": "HangSuspected", "message": "rank 1 hangs"})


def at(second: int) -> str:
    return f"2026-01-01T12:00:{second:02d}Z"


def failed(number: int, begin: int, running: int, end: int) -> Attempt:
    verdict = Verdict(reason="OOMKilled", message="", class_=FailureClass.OUT_OF_MEMORY, action="RestartGang")
    times = {"start_time": at(begin), "running_time": at(running), "end_time": at(end)}
    return Attempt(number=number, verdict=verdict, checkpoint_step=None, **times)


def test_a_restart_is_counted_once_with_its_class() -> None:
    old = JobStatus(attempt=1, attempts=[Attempt(number=1, start_time=at(0), running_time=at(2))])
    new = JobStatus(attempt=2, restarts=1, attempts=[failed(1, 0, 2, 9), Attempt(number=2, start_time=at(9))])
    assert list(happenings(old, new)) == [Restarted("OutOfMemory")]
    assert list(happenings(new, new)) == []


def test_running_again_measures_how_long_the_recovery_took() -> None:
    begun = [failed(1, 0, 2, 9), Attempt(number=2, start_time=at(10))]
    runs = [begun[0], Attempt(number=2, start_time=at(10), running_time=at(14))]
    old, new = (JobStatus(attempt=2, restarts=1, attempts=attempts) for attempts in (begun, runs))
    assert list(happenings(old, new)) == [Ran(since_begin=4.0, since_failure=5.0)]


def test_a_suspension_is_no_restart_and_no_recovery() -> None:
    suspended = Attempt(number=1, start_time=at(0), end_time=at(5), verdict=Verdict(reason="Suspended", message=""))
    runs = Attempt(number=2, start_time=at(20), running_time=at(21))
    old = JobStatus(attempts=[suspended, runs.model_copy(update={"running_time": None})])
    assert list(happenings(old, JobStatus(attempts=[suspended, runs]))) == [Ran(1.0, None)]


def test_a_pod_made_again_alone_is_counted() -> None:
    begun = Attempt(number=1, start_time=at(0), running_time=at(1))
    entry = Replacement(pod="a", uid="u", time=at(5), reason="RankFailed")
    old = JobStatus(attempts=[begun])
    new = JobStatus(restarts=1, attempts=[begun.model_copy(update={"replacements": [entry]})])
    assert list(happenings(old, new)) == [Restarted("SinglePod")]


@pytest.mark.parametrize(("before", "now", "counted"), [(None, 1, 1), (1, 3, 2), (2, 2, 0), (3, 2**31 - 1, 10)])
def test_starts_of_ranks_in_their_pods_are_counted(before: int | None, now: int, counted: int) -> None:
    """Whatever an agent says: it is one of many jobs."""
    begun = Attempt(number=1, start_time=at(0), running_time=at(1), restarts_in_place=before)
    again = begun.model_copy(update={"restarts_in_place": now})
    found = list(happenings(JobStatus(attempts=[begun]), JobStatus(attempts=[again])))
    assert found == [Restarted("InPlace")] * counted


def test_time_is_counted_in_the_phase_in_which_it_is_spent() -> None:
    clock = PhaseClock()
    clock.run(True, 0.0)
    clock.see("a", "Pending", 0.0)
    clock.see("a", "Running", 3.0)
    clock.see("b", "Running", 4.0)
    assert clock.seconds(5.0) == {"Pending": 3.0, "Running": 3.0}
    assert clock.counts() == {"Running": 2}
    clock.see("a", None, 6.0)
    assert clock.seconds(100.0)["Running"] == 3.0 + 96.0
    assert clock.counts() == {"Running": 1}


def page(clock: Callable[[], float]) -> tuple[Metrics, Callable[[], str]]:
    metrics = Metrics(clock)
    metrics.leads(True)
    metrics.registry.register(Figures(lambda: {"leader": 1.0}, lambda: {"informer_lists": 2}))
    return metrics, lambda: metrics.text().decode()


def test_the_page_has_all_figures_and_no_name() -> None:
    now = [10.0]
    metrics, text = page(lambda: now[0])
    metrics.saw_job("uid-of-a-job", "Pending", "Starting", gone=False)
    now[0] = 10.5
    metrics.made_pods("uid-of-a-job", attempt=1)
    metrics.saw_job("uid-of-a-job", "Running", "Training", gone=False)
    metrics.answered("POST", 201, 0.01)
    metrics.wrote_status(
        JobStatus(attempts=[Attempt(number=1, start_time=at(0))]),
        JobStatus(restarts=1, attempts=[failed(1, 0, 2, 9)], conditions=[SLOW, HANGS], progress=SKIPPED),
    )
    for number in (1, 2):
        # The second attempt ends while a rank is suspected.
        named = JobStatus(attempt=number, phase="Running", conditions=[HANGS])
        metrics.wrote_status(named, JobStatus(attempt=number, phase="Restarting" if number == 2 else "Running"))
    exposition = text()
    for line in (
        'disttrain_jobs{phase="Running"} 1.0',
        'disttrain_job_seconds_total{phase="Pending"} 0.5',
        'disttrain_job_state_seconds_total{state="Starting"} 0.5',
        'disttrain_job_state_seconds_total{state="Training"} 0.0',
        'disttrain_restarts_total{class="OutOfMemory"} 1.0',
        'disttrain_api_requests_total{code="201",verb="POST"} 1.0',
        "disttrain_stragglers_total 1.0",
        "disttrain_skipped_steps_total 3.0",
        "disttrain_roll_backs_total 1.0",
        "disttrain_hang_suspicions_total 1.0",
        "disttrain_hang_suspicions_withdrawn_total 1.0",
        "disttrain_job_to_pods_seconds_count 1.0",
        "disttrain_leader 1.0",
        "disttrain_informer_lists_total 2.0",
        "process_resident_memory_bytes",
    ):
        assert line in exposition, exposition
    assert "uid-of-a-job" not in exposition


def test_a_job_that_is_finished_or_gone_spends_no_more_time() -> None:
    now = [0.0]
    metrics, text = page(lambda: now[0])
    for uid in ("a", "b"):
        metrics.saw_job(uid, "Running", "Training", gone=False)
    now[0] = 2.0
    metrics.saw_job("a", "Succeeded", None, gone=False)
    now[0] = 3.0
    metrics.saw_job("b", "Running", "Training", gone=True)
    now[0] = 9.0
    assert 'disttrain_job_state_seconds_total{state="Training"} 5.0' in text()


def test_of_several_replicas_the_one_that_leads_counts_the_time_of_jobs() -> None:
    now = [0.0]
    metrics = Metrics(lambda: now[0])

    def seconds(state: str) -> str:
        page = metrics.text().decode()
        begin = f'disttrain_job_state_seconds_total{{state="{state}"}} '
        return next(line.removeprefix(begin) for line in page.splitlines() if line.startswith(begin))

    metrics.saw_job("a", "Running", "Training", gone=False)
    now[0] = 5.0
    metrics.saw_job("b", "Running", "Saving", gone=False)
    assert (seconds("Training"), seconds("Saving")) == ("0.0", "0.0")
    metrics.leads(True)
    now[0] = 8.0
    assert (seconds("Training"), seconds("Saving")) == ("3.0", "3.0")
    metrics.saw_job("b", "Running", "Training", gone=False)
    now[0] = 9.0
    metrics.leads(False)
    now[0] = 20.0
    metrics.saw_job("b", "Running", "Evaluating", gone=False)
    assert (seconds("Training"), seconds("Saving"), seconds("Evaluating")) == ("5.0", "3.0", "0.0")
    assert 'disttrain_jobs{phase="Running"} 2.0' in metrics.text().decode(), "how many there are is known to all"


def test_time_that_turns_out_to_be_another_states_is_moved_and_no_counter_falls() -> None:
    now = [0.0]
    metrics, text = page(lambda: now[0])

    def seconds() -> list[float]:
        begin = "disttrain_job_state_seconds_total{{state={}}} "
        lines = text().splitlines()
        starts = [begin.format(json.dumps(str(state))) for state in (GoodputState.TRAINING, GoodputState.EVALUATING)]
        return [float(next(line for line in lines if line.startswith(start)).removeprefix(start)) for start in starts]

    def status(at_second: int, **spent: int) -> JobStatus:
        counted = [StateSeconds(state=state, seconds=number) for state, number in spent.items()]
        return JobStatus(goodput=Goodput(since=at(0), update_time=at(at_second), state="Training", spent=counted))

    metrics.saw_job("a", "Running", "Training", gone=False)
    now[0] = 10.0
    assert seconds() == [10.0, 0.0]
    # The ranks have measured an evaluation that nobody has seen.
    metrics.wrote_status(status(0), status(10, Training=7, Evaluating=3))
    assert seconds() == [10.0, 3.0]
    now[0] = 12.0
    assert seconds() == [10.0, 3.0]
    now[0] = 20.0
    metrics.wrote_status(status(10, Training=7, Evaluating=3), status(20, Training=17, Evaluating=3))
    assert seconds() == [17.0, 3.0]
    # Anybody who may write statuses may write any number.
    metrics.wrote_status(status(20, Training=-(10**9)), status(30, Training=5, Evaluating=10**9))
    assert seconds() == [17.0, 3.0]


def test_jobs_that_seem_to_hang_are_counted_as_long_as_they_do() -> None:
    metrics, text = page(lambda: 0.0)
    for uid in ("a", "b", "c"):
        metrics.saw_job(uid, "Running", "Training", hangs=uid != "c", gone=False)
    assert "disttrain_suspected_hangs 2.0" in text()
    metrics.saw_job("a", "Running", "Training", hangs=False, gone=False)
    metrics.saw_job("b", "Running", "Training", hangs=True, gone=True)
    assert "disttrain_suspected_hangs 0.0" in text()


def test_words_of_another_version_are_one_label() -> None:
    metrics = Metrics()
    for number in range(50):
        metrics.saw_job("a", f"Phase{number}", f"State{number}", gone=False)
    verdict = failed(1, 0, 1, 2).verdict
    attempt = failed(1, 0, 1, 2).model_copy(update={"verdict": verdict.model_copy(update={"class_": "Gremlins"})})
    metrics.wrote_status(JobStatus(), JobStatus(restarts=1, attempts=[attempt]))
    page = metrics.text().decode()
    assert 'disttrain_jobs{phase="Unknown"} 1.0' in page
    assert 'disttrain_restarts_total{class="Unknown"} 1.0' in page
    assert 'disttrain_job_state_seconds_total{state="Unknown"}' in page
    assert "Phase49" not in page
    assert "State49" not in page
    assert "Gremlins" not in page
