"""A gang that trains and does no step is restarted, and nothing else is taken for that."""

from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.report import AgentStatus, RankError, RankReport, RankStatus
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import Decision
from disttrain_operator.decide.hang import exceeds, stall_of
from disttrain_operator.decide.live import Blame, Live, Stall, Suspicion
from disttrain_operator.decide.reading import observe
from tests.builders import a_job
from tests.unit.decide.world import World, a_running_world

STALL = Stall(rank=0, seconds=700, step=40, seconds_per_step=1.0, stack="all_reduce (distributed_c10d.py:2810)")
LIMIT = {"progressDeadlineSeconds": 600, "restartBackoffSeconds": 0}


def a_rank(rank: int = 0, seconds: float | None = 700.0, exit_code: int | None = None, **report: Any) -> RankStatus:
    given = {"step": 40, "total_steps": 100, "phase": "Training", "remaining_seconds": 60.0, **report}
    decide_hung = RankReport(rank=rank, **given)
    return RankStatus(rank=rank, seconds_since_step=seconds, exit_code=exit_code, report=decide_hung)


def stall(*ranks: RankStatus) -> Stall | None:
    return stall_of(AgentStatus(job_uid="u", attempt=1, ranks=list(ranks)))


def test_all_ranks_that_train_without_a_step_stall_since_the_last_of_them_did_one() -> None:
    assert stall(a_rank(3, 900.0), a_rank(2, 800.0)) == Stall(2, 800.0, 40, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        a_rank(1, seconds=None),
        a_rank(1, phase="Saving"),
        a_rank(1, phase="Evaluating"),
        a_rank(1, phase="Starting"),
        a_rank(1, phase="OfAnotherVersion"),
        a_rank(1, exit_code=0),
        a_rank(1, exit_code=-9),
        a_rank(1, done=True),
        a_rank(1, step=100),
        a_rank(1, error=RankError(exit_code=1, reason="RankFailed", message="no")),
        RankStatus(rank=1, seconds_since_step=700.0),
    ],
    ids=lambda rank: str(rank.report and rank.report.phase),
)
def test_ranks_do_not_stall_where_one_does_anything_else(other: RankStatus) -> None:
    assert stall(a_rank(0), other) is None
    assert stall(other) is None
    assert stall() is None


PROGRAM: dict[str, Any] = {
    "training": None,
    "workers": {"replicas": 2, "image": "mine:1", "command": ["train"]},
    "progress": {"totalSteps": 100, "logRules": [{"pattern": "step (?P<step>[0-9]+)"}]},
}


def test_ranks_that_never_say_what_they_do_hang_only_in_a_program_that_is_not_the_trainer() -> None:
    found = stall(a_rank(0, phase=None))
    assert found == Stall(0, 700.0, 40, 1.0, in_training=False)
    assert stall(a_rank(0), a_rank(1, phase=None)) == found
    own = {**PROGRAM, "progress": None}
    jobs = (a_job(runPolicy=LIMIT, **more) for more in ({}, PROGRAM, own))
    trained, read, reports = (job.spec for job in jobs if job.spec is not None)
    assert [exceeds(found, spec) for spec in (trained, read, reports)] == [False, True, True]
    assert [exceeds(STALL, spec) for spec in (trained, read, reports)] == [True, True, True], "a session says it"
    assert not exceeds(replace(found, seconds=599), read)
    assert not exceeds(replace(found, seconds_per_step=300.0), read), "three steps may take longer"


def test_a_program_that_prints_no_step_any_more_is_restarted() -> None:
    world = a_running_world(runPolicy=LIMIT, **PROGRAM)
    decision = decide_hung(world, stall=replace(STALL, stack="", in_training=False))
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert (verdict.class_, verdict.action) == ("Hang", "RestartGang")
    assert verdict.message.endswith("700 s without a step after step 40 (progressDeadlineSeconds: 600)")
    assert decision.status.attempt == 2


@pytest.mark.parametrize(
    ("seconds", "interval", "pace", "is_over"),
    [
        (599, 1, 1.0, False),
        (600, 1, 1.0, True),
        (600, 1000, None, True),
        (2999, 100, 10.0, False),
        (3000, 100, 10.0, True),
    ],
    ids=["not yet", "over", "no pace is known", "two lines of the log take longer", "the log should have come"],
)
def test_the_deadline_is_never_shorter_than_the_log_is_slow(
    seconds: float, interval: int, pace: float | None, is_over: bool
) -> None:
    job = a_job(runPolicy=LIMIT, training={"logging": {"interval": interval}})
    assert job.spec is not None
    assert exceeds(replace(STALL, seconds=seconds, seconds_per_step=pace), job.spec) is is_over


SHORT = {"progressDeadlineSeconds": 10, "restartBackoffSeconds": 0}
SUSPICION = Suspicion(Blame(1, "is stopped by a signal, and rank 0 waits in f (a:1)", certain=True), 4.0, 0.1, 0.3)


@pytest.mark.parametrize(
    ("seconds", "suspicion", "hangs"),
    [(59, None, False), (60, None, True), (9, SUSPICION, False), (10, SUSPICION, False), (30, SUSPICION, True)],
    ids=["nobody is named", "after a minute", "not yet", "three lines of the log take longer", "a rank is named"],
)
def test_a_short_deadline_is_a_minute_unless_a_rank_seems_to_hang(
    seconds: float, suspicion: Suspicion | None, hangs: bool
) -> None:
    world = a_running_world(runPolicy=SHORT)
    decision = decide_hung(world, stall=replace(STALL, seconds=seconds), suspicion=suspicion)
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert (verdict is not None and verdict.class_ == "Hang") is hangs


def decide_hung(world: World, **changes: Any) -> Decision:
    """What is decided when the first worker's agent has said so."""
    live = Live(world.pod()["metadata"]["uid"], world.job.status.attempt, None, STALL)
    observed = replace(observe(world.pods.values(), world.gone, (), world.services), live=replace(live, **changes))
    return decide(world.job, observed, world.now)


def test_a_gang_that_hangs_is_restarted_and_counted_and_the_verdict_says_where_it_was() -> None:
    world = a_running_world(runPolicy=LIMIT)
    decision = decide_hung(world)
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert (verdict.class_, verdict.action, verdict.reason) == ("Hang", "RestartGang", "ProgressDeadlineExceeded")
    assert (verdict.rank, verdict.node, verdict.pod) == (0, "node1", world.pod()["metadata"]["name"])
    for sentence in ("700 s without a step after step 40", "progressDeadlineSeconds: 600", STALL.stack):
        assert sentence in verdict.message
        assert sentence in decision.events[0].message
    assert (decision.status.attempt, decision.status.restarts_since_checkpoint) == (2, 1)


def test_the_rank_that_holds_up_the_others_is_the_verdicts_with_its_pod_and_node() -> None:
    world = a_running_world(runPolicy=LIMIT)
    decision = decide_hung(world, stall=replace(STALL, blame=Blame(1, "does not answer, and rank 0 waits in f (a:1)")))
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    pod = world.pod(1)
    assert (verdict.rank, verdict.pod, verdict.node) == (1, pod["metadata"]["name"], pod["spec"]["nodeName"])
    assert verdict.message == (
        f"rank 1 (pod {verdict.pod} on node {verdict.node}) does not answer, and rank 0 waits in f (a:1): rank 0 (pod "
        f"{world.pod()['metadata']['name']} on node node1) has trained for 700 s without a step after step 40 "
        "(progressDeadlineSeconds: 600)"
    )


def test_ranks_that_wait_for_each_other_are_the_message_and_nobody_is_the_verdicts() -> None:
    both = "rank 0 waits in f (a:1), and rank 1 waits in g (b:1): they wait for each other"
    world = a_running_world(runPolicy=LIMIT)
    decision = decide_hung(world, stall=replace(STALL, blame=Blame(None, both, certain=True)))
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert (verdict.rank, verdict.pod, verdict.node, verdict.class_) == (None, None, None, "Hang")
    assert verdict.message.startswith(
        f"{both}: rank 0 (pod {world.pod()['metadata']['name']} on node node1) has trained"
    )
    assert STALL.stack not in verdict.message


def test_the_verdict_ends_with_where_the_groups_are_in_their_calls() -> None:
    stall = replace(STALL, recorded="by torch's flight recorder in group 0 rank 0 waits in call 4")
    decision = decide_hung(a_running_world(runPolicy=LIMIT), stall=stall)
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert verdict.message.endswith(f"; it is in {STALL.stack}; {stall.recorded}")


def test_a_rank_that_no_pod_of_the_job_has_is_not_blamed() -> None:
    decision = decide_hung(a_running_world(runPolicy=LIMIT), stall=replace(STALL, blame=Blame(9, "is hostile")))
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert verdict.rank == 0
    assert verdict.message.endswith(f"; it is in {STALL.stack}")


def test_the_answer_of_the_attempt_that_hung_says_nothing_of_the_next() -> None:
    world = a_running_world(runPolicy=LIMIT)
    uid = world.pod()["metadata"]["uid"]
    status = decide_hung(world).status
    assert status is not None
    world.raw_job["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.settle().confirm_deletions().settle().run_all()
    decision = decide_hung(world, pod_uid=uid, attempt=1)
    assert (decision.reason, decision.actions) == ("AllPodsRunning", ())


def test_a_job_without_a_restart_left_fails_with_the_hang_as_its_cause() -> None:
    decision = decide_hung(a_running_world(runPolicy=LIMIT | {"maxRestarts": 0}))
    assert decision.reason == "ProgressDeadlineExceeded"
    assert decision.status is not None
    assert decision.status.phase == "Failed"


@pytest.mark.parametrize(
    ("rule", "action"),
    [
        ({"action": "FailJob", "reasons": ["ProgressDeadlineExceeded"]}, "FailJob"),
        ({"action": "RestartWithoutCounting"}, "RestartWithoutCounting"),
        ({"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}, "RestartGang"),
    ],
)
def test_a_rule_of_the_failure_policy_may_match_it(rule: dict[str, Any], action: str) -> None:
    decision = decide_hung(a_running_world(runPolicy=LIMIT | {"failurePolicy": {"rules": [rule]}}))
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert verdict.action == action


def _silent(world: World) -> None:
    pod = deepcopy(world.pod(1))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.put(pod)


@pytest.mark.parametrize(
    ("policy", "changes", "what"),
    [
        ({}, {}, None),
        (LIMIT, {"stall": None}, None),
        (LIMIT, {"stall": replace(STALL, seconds=599)}, None),
        (LIMIT, {"attempt": 7}, None),
        (LIMIT, {"pod_uid": "of another life"}, None),
        (LIMIT, {}, lambda world: world.drain(1)),
        (LIMIT, {}, lambda world: world.drain(0, None)),
        (LIMIT, {}, lambda world: world.end(1, 0)),
        (LIMIT, {}, lambda world: world.edit(suspend=True)),
        (LIMIT, {}, _silent),
    ],
    ids=[
        "no limit",
        "its ranks get on",
        "not yet",
        "of another attempt",
        "of another pod",
        "a pod is drained",
        "a pod is deleted",
        "a pod has ended",
        "it is suspended",
        "a node does not report",
    ],
)
def test_nothing_else_is_a_hang(policy: dict[str, Any], changes: dict[str, Any], what: Any) -> None:
    world = a_running_world(runPolicy=policy)
    if what is not None:
        what(world)
    status = decide_hung(world, **changes).status
    assert status is not None
    verdict = status.attempts[0].verdict
    assert verdict is None or verdict.class_ != "Hang"
    assert status.attempt == 1


@pytest.mark.parametrize(("ago", "reason"), [(0, "AllPodsRunning"), (89, "AllPodsRunning"), (90, "Hang")])
def test_a_node_that_reports_again_has_time_for_new_steps(ago: int, reason: str) -> None:
    """A frozen machine goes on, and its pod is ready again before its ranks have logged a step: every tenth is, of a
    second each."""
    world = a_running_world(runPolicy=LIMIT)
    again = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp(world.now - timedelta(seconds=ago))}
    world.pod(1)["status"]["conditions"] = [again]
    decision = decide_hung(world)
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert (decision.reason if verdict is None else verdict.class_) == reason


def test_a_gang_that_has_not_run_yet_does_not_hang() -> None:
    world = a_running_world(runPolicy=LIMIT)
    del world.raw_job["status"]["attempts"][0]["runningTime"]
    assert decide_hung(world).reason == "AllPodsRunning"
