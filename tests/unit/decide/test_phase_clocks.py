"""Ranks that start, evaluate or save and show no sign that they get on are restarted, and nothing else is taken for
that."""

from dataclasses import replace
from typing import Any

import pytest

from disttrain_api.report import AgentStatus, Idle, RankError, RankPhase, RankReport, RankStatus
from disttrain_operator.decide.decision import RestartInPlace
from disttrain_operator.decide.hang import exceeds
from disttrain_operator.decide.live import Blame, Stall
from disttrain_operator.decide.phase_clocks import idle_stall_of, limit_of, together
from tests.builders import a_job
from tests.unit.decide.test_hang import LIMIT, PROGRAM, decide_hung
from tests.unit.decide.world import a_running_world

STARTING, TRAINING, EVALUATING, SAVING = (
    RankPhase.STARTING, RankPhase.TRAINING, RankPhase.EVALUATING, RankPhase.SAVING,
)  # fmt: skip


def a_rank(
    rank: int = 0, seconds: float = 1800.0, phase: RankPhase = EVALUATING, longest: float | None = None,
    since_step: float | None = 1800.0, exit_code: int | None = None, **report: Any,
) -> RankStatus:  # fmt: skip
    idle = Idle(phase=phase, seconds=seconds, longest_seconds=longest)
    found = RankReport(rank=rank, phase=phase, **({"step": 40, "total_steps": 100} | report))
    return RankStatus(rank=rank, seconds_since_step=since_step, exit_code=exit_code, report=found, idle=idle)


def stall(*ranks: RankStatus, deadline: int | None = 600, **spec: Any) -> Stall | None:
    job = a_job(runPolicy={} if deadline is None else {"progressDeadlineSeconds": deadline}, **spec)
    assert job.spec is not None
    return idle_stall_of(AgentStatus(job_uid="u", attempt=1, ranks=list(ranks)), job.spec)


@pytest.mark.parametrize(
    ("phase", "longest", "deadline", "limit"),
    [
        (STARTING, None, 10, 900),
        (STARTING, 1.0, 10, 900),
        (STARTING, None, 600, 1800),
        (TRAINING, 1.0, 600, 1800),
        (EVALUATING, None, 10, 900),
        (EVALUATING, None, 600, 1800),
        (EVALUATING, 0.1, 10, 300),
        (EVALUATING, 0.1, 600, 600),
        (EVALUATING, 200.0, 600, 1000),
        (SAVING, None, 600, 1800),
        (SAVING, 0.1, 10, 600),
        (SAVING, 0.1, 700, 700),
        (SAVING, 300.0, 700, 1500),
    ],
)
def test_a_phase_has_more_time_than_steps_and_several_times_what_it_took_before(
    phase: RankPhase, longest: float | None, deadline: int, limit: float
) -> None:
    assert limit_of(Idle(phase=phase, seconds=0, longest_seconds=longest), deadline) == limit
    found = stall(a_rank(0, limit, phase, longest, since_step=None), deadline=deadline)
    assert found == Stall(0, limit, 40, None, phase=phase, limit_seconds=limit)
    assert stall(a_rank(0, limit - 1, phase, longest, since_step=None), deadline=deadline) is None


def test_ranks_in_different_phases_have_their_own_limits_and_the_lowest_is_named() -> None:
    """As where the first worker's rank still writes a checkpoint, and the others wait for it in a step."""
    found = stall(a_rank(3, 1900.0, TRAINING), a_rank(2, 650.0, SAVING, 0.1))
    assert found == Stall(2, 650.0, 40, None, phase=SAVING, limit_seconds=600)
    assert stall(a_rank(3, 1700.0, TRAINING), a_rank(2, 650.0, SAVING, 0.1)) is None
    assert together([Stall(5, 700.0, 40, None), found]) == found


@pytest.mark.parametrize(
    "other",
    [
        a_rank(1, seconds=5.0),
        a_rank(1, exit_code=0),
        a_rank(1, exit_code=-9),
        a_rank(1, done=True),
        a_rank(1, error=RankError(exit_code=1, reason="RankFailed", message="no")),
        RankStatus(rank=1, seconds_since_step=1800.0),
    ],
    ids=["it gets on", "it has ended", "it was killed", "it is done", "it fails", "an agent of another version"],
)
def test_ranks_do_not_hang_where_one_gets_on_or_does_not_say(other: RankStatus) -> None:
    assert stall(a_rank(0)) is not None
    assert stall(a_rank(0), other) is None
    assert stall(other) is None
    assert stall() is None


def test_without_a_deadline_there_is_no_limit() -> None:
    assert stall(a_rank(0, 1e9), deadline=None) is None


def test_ranks_that_have_logged_a_step_and_take_steps_are_judged_by_those() -> None:
    assert stall(a_rank(0, 1e6, TRAINING)) is None
    assert stall(a_rank(0, 1e6, TRAINING, since_step=None)) is not None, "the first step"


def test_a_program_is_judged_from_its_first_step_on() -> None:
    assert stall(a_rank(0, 1e6, TRAINING, since_step=None), **PROGRAM) is None
    assert stall(a_rank(0, 1e6, SAVING, since_step=None), **PROGRAM) is None
    assert stall(a_rank(0, 1e6, SAVING), **PROGRAM) is not None


@pytest.mark.parametrize(
    ("phase", "step", "does"),
    [
        (STARTING, 0, "is starting"),
        (TRAINING, 0, "is training"),
        (EVALUATING, 40, "is evaluating after step 40"),
        (SAVING, 40, "is saving a checkpoint after step 40"),
    ],
)
def test_the_verdict_has_the_phase_the_rank_and_the_limit(phase: RankPhase, step: int, does: str) -> None:
    world = a_running_world(runPolicy=LIMIT)
    blame = Blame(1, "is in write (a:1), and rank 0 waits in f (a:1)", awaited=True)
    found = Stall(0, 1900.0, step, None, stack="f (a:1)", blame=blame, phase=phase, limit_seconds=1800)
    decision = decide_hung(world, stall=found)
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert (verdict.class_, verdict.action, verdict.reason) == ("Hang", "RestartGang", "ProgressDeadlineExceeded")
    assert (verdict.rank, verdict.pod) == (1, world.pod(1)["metadata"]["name"])
    assert verdict.message == (
        f"rank 1 (pod {verdict.pod} on node {verdict.node}) is in write (a:1), and rank 0 waits in f (a:1): "
        f"rank 0 (pod {world.pod()['metadata']['name']} on node node1) {does} and has shown no sign of progress for"
        " 1900 s, which is more than 1800 s (progressDeadlineSeconds: 600)"
    )


def test_within_the_limit_and_without_a_deadline_nothing_is_decided() -> None:
    found = Stall(0, 1900.0, 40, None, phase=SAVING, limit_seconds=1901)
    for run_policy, one in ((LIMIT, found), ({}, replace(found, limit_seconds=600))):
        decision = decide_hung(a_running_world(runPolicy=run_policy), stall=one)
        assert (decision.reason, decision.actions) == ("AllPodsRunning", ())


def test_a_hang_in_an_evaluation_restarts_in_place_first() -> None:
    found = Stall(0, 1900.0, 40, None, phase=EVALUATING, limit_seconds=600)
    decision = decide_hung(a_running_world(runPolicy={**LIMIT, "restartStrategy": "InPlace"}), stall=found)
    assert [type(action) for action in decision.actions] == [RestartInPlace]
    assert decision.status is not None
    assert decision.status.attempt == 1


def test_a_stall_of_steps_keeps_their_deadline() -> None:
    job = a_job(runPolicy=LIMIT)
    assert job.spec is not None
    assert exceeds(Stall(0, 600.0, 40, 1.0), job.spec)
