"""Ranks that start again in their pod, as the operator sees them: in attempts, Events, progress and goodput."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.bounds import MAX_MESSAGE_BYTES
from disttrain_api.goodput import by_state, counted_until
from disttrain_api.report import (
    AgentStatus,
    FailureSignature,
    PodReport,
    RankFailure,
    RankReport,
    RankStatus,
    RestartsInPlace,
)
from disttrain_api.status import Attempt, Progress
from disttrain_operator.agent_client import Agent, live_of
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import Event
from disttrain_operator.decide.hang import stall_of
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.reading import observe
from tests.unit.decide.test_failures import verdict
from tests.unit.decide.world import World, a_running_world

KILLED = RankFailure(rank=1, exit_code=137, signal=9)
RAISED = RankFailure(
    rank=1,
    exit_code=1,
    message="ValueError: the secret is 42",
    unquoted="ValueError",
    signature=FailureSignature(error="ValueError", place="/app/data.py:33", step=4, steps_done=4),
)
POD = "digits-3f9a1-worker-0-a1"


def in_place(**policy: Any) -> World:
    """A job of two ranks in one pod, which runs."""
    policy = {"restartStrategy": "InPlace", "restartBackoffSeconds": 0, **policy}
    return a_running_world(workers={"replicas": 1, "processesPerPod": 2}, runPolicy=policy)


def in_place_of_two_pods() -> World:
    """A job of two pods with two ranks each, which runs."""
    return a_running_world(workers={"replicas": 2, "processesPerPod": 2}, runPolicy={"restartStrategy": "InPlace"})


def restarted(
    world: World, count: int = 1, failure: RankFailure = KILLED, ago: float = 0.0, pause: float | None = None
) -> RestartsInPlace:
    time = timestamp(world.now - timedelta(seconds=ago))
    return RestartsInPlace(count=count, time=time, failure=failure, pause_seconds=pause)


def trains(step: int, phase: str = "Training") -> RankReport:
    return RankReport(rank=0, step=step, total_steps=100, loss=0.5, phase=phase, remaining_seconds=60.0)


def events_of(
    world: World, report: RankReport | None, restarts: RestartsInPlace | None = None, attempt: int = 1
) -> tuple[Event, ...]:
    """The agent answers and the operator writes what it has learned; returns the Events."""
    live = Live(world.pod()["metadata"]["uid"], attempt, report, restarts_in_place=restarts)
    observed = observe(world.pods.values(), world.gone, services=world.services)
    decision = decide(world.job, replace(observed, live=live), world.now)
    assert not decision.actions
    world.raw_job["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return tuple(event for event in decision.events if event.reason == "RestartedInPlace")


def attempt(world: World, number: int = 1) -> Attempt:
    return next(found for found in world.job.status.attempts if found.number == number)


def progress(world: World) -> Progress:
    found = world.job.status.progress
    assert found is not None
    return found


def spent(world: World) -> dict[str, int]:
    known = world.job.status.goodput
    assert known is not None
    return by_state(counted_until(known, world.now))


@pytest.mark.parametrize(
    ("kubelet", "reason", "kills", "class_"),
    [
        ("Error", "OOMKilled", True, "OutOfMemory"),
        ("OOMKilled", "OOMKilled", True, "OutOfMemory"),
        ("OOMKilled", None, True, "OutOfMemory"),
        ("OOMKilled", None, None, "OutOfMemory"),
        ("OOMKilled", None, False, "Program"),
        ("Error", None, True, "Program"),
    ],
)
def test_an_agent_that_lives_on_knows_whether_its_ranks_ended_for_want_of_memory(
    kubelet: str, reason: str | None, kills: bool | None, class_: str
) -> None:
    """The runtime says `OOMKilled` of a container in which the kernel has once killed a process, hours before too."""
    world = in_place()
    code = 137 if reason else 1
    failure = RankFailure(rank=1, exit_code=code, signal=9 if reason else None, reason=reason, out_of_memory=kills)
    world.end(0, code, reason=kubelet, report=PodReport(failure=failure)).settle()
    found = verdict(world)
    assert (found.class_, found.reason == "OOMKilled", found.action) == (class_, class_ != "Program", "RestartGang")


def test_a_restart_after_a_rank_ran_out_of_memory_says_so() -> None:
    world = in_place()
    events_of(
        world, None, restarted(world, 1, KILLED.model_copy(update={"reason": "OOMKilled", "out_of_memory": True}))
    )
    assert attempt(world).last_restart_in_place == f"rank 1 (pod {POD} on node node1) ran out of memory and was killed"


def test_a_restart_is_written_into_the_attempt_and_is_one_event() -> None:
    world = in_place()
    assert events_of(world, trains(5)) == ()
    assert attempt(world).restarts_in_place is None
    (event,) = events_of(world, None, restarted(world))
    sentence = f"rank 1 (pod {POD} on node node1) was killed by signal 9"
    assert event == Event("RestartedInPlace", f"{sentence}; restart 1 in place of its ranks", warning=True)
    assert events_of(world, trains(4), restarted(world)) == (), "it is known"
    assert (attempt(world).restarts_in_place, attempt(world).last_restart_in_place) == (1, sentence)
    (event,) = events_of(world, trains(4), restarted(world, 3))
    assert "restart 3 in place" in event.message, "one Event for all that happened since the last look"
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_since_checkpoint) == (1, 0, 0)
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


@pytest.mark.parametrize("count", [0, 1])
def test_a_count_never_goes_back(count: int) -> None:
    world = in_place()
    events_of(world, None, restarted(world, 2))
    assert events_of(world, trains(3), restarted(world, count) if count else None) == ()
    assert attempt(world).restarts_in_place == 2


@pytest.mark.parametrize(
    ("failure", "quoted", "text"),
    [
        (RAISED, False, "exited with code 1: ValueError at /app/data.py:33 (its log says more)"),
        (RAISED, True, "exited with code 1: ValueError: the secret is 42"),
        (KILLED, True, "was killed by signal 9"),
        (RankFailure(rank=1, exit_code=93, message="left at step 4"), False, "exited with code 93: left at step 4"),
        (RankFailure(rank=1), False, "ended"),
    ],
)
def test_a_programs_text_stays_in_its_log_unless_asked_for(failure: RankFailure, quoted: bool, text: str) -> None:
    world = in_place(failureLogInStatus=quoted)
    (event,) = events_of(world, trains(4), restarted(world, failure=failure))
    assert attempt(world).last_restart_in_place == f"rank 1 (pod {POD} on node node1) {text}"
    assert text in event.message
    assert ("secret" in event.message) is (quoted and failure is RAISED)


def test_words_of_a_pod_are_bounded() -> None:
    world = in_place(failureLogInStatus=True)
    events_of(world, None, restarted(world, failure=RankFailure(rank=1, exit_code=1, message="x" * 2000)))
    assert len(attempt(world).last_restart_in_place or "") < MAX_MESSAGE_BYTES / 2


def test_termination_messages_report_restarts_that_no_answer_reported() -> None:
    world = in_place()
    report = PodReport(progress=RankReport(rank=0, step=100, total_steps=100), restarts_in_place=restarted(world, 2))
    world.end(0, 0, report=report).step()
    assert [event.reason for event in world.events if "InPlace" in event.reason] == ["RestartedInPlace"]
    assert (attempt(world).restarts_in_place, world.job.status.phase) == (2, "Succeeded")


def test_another_attempt_begins_without_any() -> None:
    world = in_place()
    events_of(world, trains(3), restarted(world, 2))
    world.end(0, 137, report=PodReport(restarts_in_place=restarted(world, 3))).settle().confirm_deletions().settle()
    world.run_all()
    events_of(world, trains(3), attempt=2)
    assert [found.restarts_in_place for found in world.job.status.attempts] == [3, None]
    events_of(world, trains(3), restarted(world), attempt=2)
    assert [found.restarts_in_place for found in world.job.status.attempts] == [3, 1]


def test_an_answer_of_another_pod_tells_nothing() -> None:
    world = in_place()
    live = Live("of another life", 1, None, restarts_in_place=restarted(world))
    decision = decide(world.job, replace(observe(world.pods.values()), live=live), world.now)
    assert decision.events == ()


def test_the_last_step_stays_until_the_ranks_say_where_they_go_on() -> None:
    world = in_place()
    events_of(world, trains(9))
    events_of(world, None, restarted(world))
    seen = progress(world)
    assert (seen.step, seen.loss, seen.phase, seen.remaining) == (9, 0.5, "Restarting", None)
    events_of(world, trains(0, "Starting"), restarted(world))
    assert (progress(world).step, progress(world).phase) == (9, "Restarting"), "they have not read the checkpoint"
    events_of(world, trains(0, "Restoring"), restarted(world))
    assert (progress(world).step, progress(world).phase) == (9, "Restoring"), "they are reading it"
    events_of(world, trains(5), restarted(world))
    assert (progress(world).step, progress(world).phase) == (5, "Training")


def test_time_from_the_failure_until_steps_are_new_is_lost_time() -> None:
    world = in_place()
    events_of(world.pass_time(1), trains(1))
    events_of(world.pass_time(50), trains(9))
    events_of(world.pass_time(10), None, restarted(world, ago=7))
    events_of(world.pass_time(20), trains(5), restarted(world, ago=27))
    events_of(world.pass_time(30), trains(10), restarted(world, ago=57))
    world.pass_time(40)
    assert spent(world) == {"Starting": 1, "Training": 50 + 3 + 40, "Restarting": 7 + 20, "Redoing": 30}


def test_the_pause_before_ranks_start_again_and_what_they_read_have_states_of_their_own() -> None:
    world = in_place()
    events_of(world.pass_time(1), trains(1))
    events_of(world.pass_time(50), trains(9))
    events_of(world.pass_time(10), None, restarted(world, ago=7, pause=20))
    events_of(world.pass_time(20), trains(0, "Restoring"), restarted(world, ago=27, pause=20))
    events_of(world.pass_time(4), trains(10), restarted(world, ago=31, pause=20))
    world.pass_time(40)
    found = {"Starting": 1, "Training": 50 + 3 + 40, "Waiting": 20, "Restarting": 7, "Restoring": 4}
    assert spent(world) == found


@pytest.mark.parametrize("pause", [1e15, 3600.0], ids=["of any agent", "longer than it took"])
def test_a_pause_adds_no_second(pause: float) -> None:
    world = in_place()
    events_of(world.pass_time(1), trains(1))
    events_of(world.pass_time(50), None, restarted(world, ago=7, pause=pause))
    events_of(world.pass_time(10), trains(6), restarted(world, ago=17, pause=pause))
    assert spent(world) == {"Starting": 1, "Training": 43, "Waiting": 17}


def test_a_restart_between_two_answers_counts_from_the_failure() -> None:
    world = in_place()
    events_of(world.pass_time(1), trains(1))
    events_of(world.pass_time(50), trains(9))
    events_of(world.pass_time(10), trains(6), restarted(world, ago=8))
    world.pass_time(5)
    assert spent(world) == {"Starting": 1, "Training": 52, "Restarting": 8, "Redoing": 5}


@pytest.mark.parametrize(("ago", "training"), [(-500, 60), (5000, 50)], ids=["a clock ahead", "before the last count"])
def test_a_nodes_clock_that_is_wrong_moves_no_other_second(ago: float, training: int) -> None:
    world = in_place()
    events_of(world.pass_time(1), trains(1))
    events_of(world.pass_time(50), trains(9))
    events_of(world.pass_time(10), trains(6), restarted(world, ago=ago))
    assert spent(world)["Training"] == training
    assert sum(spent(world).values()) == 61


def test_ranks_that_start_again_do_not_hang() -> None:
    """Whatever the agent says between two lives is no report of ranks that train."""
    between = AgentStatus(
        job_uid="u",
        attempt=1,
        ranks=[RankStatus(rank=0, exit_code=91), RankStatus(rank=1, exit_code=-9)],
        restarts_in_place=RestartsInPlace(count=1, time="2026-01-01T12:00:00Z", failure=KILLED),
        awaited=[3],
    )
    again = between.model_copy(update={"ranks": [RankStatus(rank=0), RankStatus(rank=1)]})
    for status in (between, again):
        assert stall_of(status) is None
        live = live_of(Agent("u", "pod", 1, "10.0.0.1", 29700), status)
        assert live.restarting
        assert (live.restarts_in_place, live.awaited) == (between.restarts_in_place, {3})


@pytest.mark.parametrize(
    ("error", "repeated", "phase"),
    [("NameError", True, "Failed"), ("NameError", False, "Restarting"), ("torch.AcceleratorError", True, "Restarting")],
    ids=["repeated", "once", "a device may be broken here alone"],
)
def test_a_failure_that_came_again_in_place_ends_the_job(error: str, repeated: bool, phase: str) -> None:
    world = in_place()
    signature = FailureSignature(error=error, place="/app/m.py:1", step=4, steps_done=4)
    failure = RankFailure(rank=1, exit_code=1, message=f"{error}: x", signature=signature, repeated=repeated)
    world.end(0, 1, report=PodReport(failure=failure)).step()
    assert world.job.status.phase == phase
    if phase == "Failed":
        same = "a restart in place met the same failure (NameError at /app/m.py:1), and no step was done between them"
        assert same in world.condition("Failed")[2]


def test_what_is_not_true_in_a_report_is_no_repetition() -> None:
    assert not RankFailure.model_validate({"rank": 0, "repeated": "yes"}).repeated
    assert not RankFailure.model_validate({"rank": 0, "repeated": 1}).repeated
    assert RankFailure.model_validate({"rank": 0, "repeated": True}).repeated


@pytest.mark.parametrize(
    "restarts",
    [
        {"count": 0, "time": "2026-01-01T12:00:00Z", "failure": {"rank": 0}},
        {"count": 2**31, "time": "2026-01-01T12:00:00Z", "failure": {"rank": 0}},
        {"count": 1, "time": "yesterday", "failure": {"rank": 0}},
        {"count": 1, "time": "2026-01-01T12:00:00Z", "failure": None},
        [1],
    ],
)
def test_restarts_that_cannot_be_are_left_out_and_nothing_else(restarts: Any) -> None:
    found = AgentStatus.model_validate({"jobUid": "u", "attempt": 1, "restartsInPlace": restarts})
    assert found.restarts_in_place is None


@pytest.mark.parametrize(("rank", "worker"), [(1, 0), (2, 1), (3, 1), (99, 0)])
def test_the_failed_rank_is_named_with_its_own_pod_though_worker_0s_agent_reports_it(rank: int, worker: int) -> None:
    world = in_place_of_two_pods()
    events_of(world, trains(40))
    (event,) = events_of(world, None, restarted(world, failure=KILLED.model_copy(update={"rank": rank})))
    why = f"rank {rank} (pod digits-3f9a1-worker-{worker}-a1 on node node1) was killed by signal 9"
    assert attempt(world).last_restart_in_place == why
    assert event.message.startswith(why)
