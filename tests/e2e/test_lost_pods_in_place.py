"""Pods of a job that restarts in place are lost one after the other, worker 0's among them: each is recreated alone,
and the ranks go on from the memory of the one that is left."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from disttrain_api.times import parse_time
from tests.builders import merge
from tests.chaos import agent_of, lives
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import APART, NO_CHECKPOINT_SOON, long_job
from tests.e2e.observe import disttrain, end_soon, first_step, pod
from tests.e2e.on_nodes import OnNodes

pytestmark = pytest.mark.usefixtures("of_this_machine")

NAME = "loses"
STEPS = 20
"""In each life, at least."""


def kill_the_agent(kubectl: Kubectl, run: OnNodes, worker: int) -> str:
    """SIGKILL to the first process of a pod: its container ends with all that is in it. Returns the reason."""
    agent_of(run.ranks()[worker]).kill()
    return "RankFailed"


def delete_by_force(kubectl: Kubectl, run: OnNodes, worker: int) -> str:
    """Its object is gone at once. Returns the reason."""
    kubectl("delete", "pod", pod_of(kubectl, worker), "--grace-period=0", "--force")
    return "PodLost"


def delete(kubectl: Kubectl, run: OnNodes, worker: int) -> str:
    """It is asked to end. Returns the reason."""
    kubectl("delete", "pod", pod_of(kubectl, worker), "--wait=false")
    return "PodLost"


def pod_of(kubectl: Kubectl, worker: int) -> str:
    return str(pod(kubectl, NAME, "worker", str(worker))["metadata"]["name"])


WAYS: list[tuple[Callable[[Kubectl, OnNodes, int], str], int]] = [
    (kill_the_agent, 1), (kill_the_agent, 0), (delete_by_force, 0), (delete, 0), (delete_by_force, 1),
]  # fmt: skip


WITHOUT = 2
"""After this loss there is no checkpoint before the next one, of the same pod."""


def later(kubectl: Kubectl, lost_at: datetime | None) -> bool:
    """Whether the ranks do steps a minute after the loss."""
    last = parse_time(kubectl.status(NAME)["progress"].get("lastStepTime"))
    assert lost_at is not None
    return last is not None and last > lost_at + timedelta(seconds=60)


def test_each_lost_pod_is_recreated_alone_and_no_step_is_lost(kubectl: Kubectl) -> None:
    """No checkpoint is due: what the ranks go on with was in memory, or was saved because a pod was asked to end.
    Afterwards one is asked for, and once a minute of steps is awaited instead: a pod that is lost twice without either
    takes the gang with it."""
    policy = {"restartStrategy": "InPlace", "maxRestarts": len(WAYS), "restartBackoffSeconds": 0}
    training = merge(NO_CHECKPOINT_SOON, {"logging": {"interval": 1}})
    kubectl.apply(long_job(NAME, workers={"template": APART}, runPolicy=policy, training=training))
    first_step(kubectl, NAME, attempt=1)
    run, reasons = OnNodes(kubectl, NAME), list[str]()

    def steps(generation: int) -> list[int]:
        return sorted(step for (_, life), found in lives(run.metrics).items() if life == generation for step in found)

    for count, (lose, worker) in enumerate(WAYS, start=1):
        kubectl.until(lambda life=count - 1: len(steps(life)) > STEPS, "the ranks take steps", job=NAME)
        before, lost = run.uids, pod_of(kubectl, worker)
        reasons.append(lose(kubectl, run, worker))
        kubectl.until(lambda life=count: len(steps(life)) > STEPS, "the ranks take steps again", job=NAME)
        kubectl.wait("Running", NAME)
        kubectl.wait_for(f"{{.status.attempts[0].restartsInPlace}}={count}", NAME)
        described = kubectl.describe_job(NAME)
        (attempt,) = kubectl.status(NAME)["attempts"]
        assert [entry["reason"] for entry in attempt["replacements"]] == reasons, described
        assert (attempt["replacements"][-1]["pod"], attempt["replacements"][-1]["uid"]) == (lost, before[lost])
        assert {name for name, uid in run.uids.items() if before[name] != uid} == {lost}, described
        # The step in flight may be done again, and the last one that was done may have no line.
        assert 0 <= steps(count)[0] - steps(count - 1)[-1] <= 2, described
        if count == WITHOUT:
            lost_at = parse_time(attempt["replacements"][-1]["time"])
            kubectl.until(lambda at=lost_at: later(kubectl, at), "the new pod takes steps", job=NAME)
        else:
            disttrain(kubectl, "checkpoint", NAME)
    status = kubectl.status(NAME)
    assert (status["attempt"], status["restarts"], status["restartsSinceCheckpoint"]) == (1, len(WAYS), 0)
    end_soon(kubectl, NAME)
