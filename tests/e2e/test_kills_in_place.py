"""Ranks of a job that restarts in place are killed on a cluster, again and again, and so is the operator meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.builders import merge
from tests.chance import chance
from tests.chaos import MOST_STEPS, Chaos, has_the_steps_of, lives, says_what_happened
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import WITH_SLOW_DATA, long_job
from tests.e2e.observe import checkpoint, end_soon, train_until_a_checkpoint
from tests.e2e.on_nodes import OnNodes
from tools.cluster.paths import REPOSITORY

pytestmark = pytest.mark.usefixtures("of_this_machine")

KILLS, PODS, PER_POD = 30, 2, 2
INTERVAL, BATCH = 3, 16
STEPS = (KILLS + 2) * MOST_STEPS
"""More than all lives before the last one can do."""
HELD, HELD_DATA = "held-data", REPOSITORY / "tests" / "local" / "held_data.py"


def held_job(name: str, file: str) -> dict[str, Any]:
    """A job that restarts in place; its ranks are held after some steps of each life, until the file is there."""
    data = {
        "entrypoint": "held_data:paced_digits_until",
        "config": {"samples": MOST_STEPS * BATCH, "file": file, "seconds": None},
    }
    training = {
        "data": data,
        "steps": STEPS,
        "microBatchSize": BATCH,
        "checkpoint": {"interval": INTERVAL},
        "logging": {"interval": 1},
    }
    policy = {"restartStrategy": "InPlace", "maxRestarts": 1000, "restartBackoffSeconds": 0}
    volumes = [{"name": "user-code", "configMap": {"name": HELD}}]
    workers = {"processesPerPod": PER_POD, "template": merge(WITH_SLOW_DATA, {"spec": {"volumes": volumes}})}
    return long_job(name, training=training, runPolicy=policy, workers=workers)


def test_thirty_kills_change_no_step_and_no_pod_and_the_status_tells_of_each(kubectl: Kubectl) -> None:
    kubectl("create", "configmap", HELD, f"--from-file={HELD_DATA}")
    kubectl.apply(held_job("chaos", "/checkpoints/released"))
    kubectl.apply(held_job("calm", "/etc/hostname"))
    kubectl.wait("Finished", "calm")
    kubectl.wait("Running", "chaos")
    run, random = OnNodes(kubectl, "chaos"), chance()
    pods, chaos = run.uids, Chaos(run, PODS, PER_POD, random)
    of_two = [chaos.kill_two, chaos.kill_beside_a_stopped_rank] * 2
    of_two += [chaos.kill_amid_a_restart, chaos.kill_one_of_each_pod] * 3
    acts: list[Callable[[], None]] = of_two + [chaos.kill_a_rank] * (KILLS - 2 * len(of_two))
    random.shuffle(acts)
    for act in acts:
        act()
    assert chaos.kills == KILLS
    (run.storage / "released").touch()
    kubectl.wait("Finished", "chaos")
    assert kubectl.condition("chaos", "Complete")["status"] == "True", kubectl.describe_job("chaos")
    has_the_steps_of(run, OnNodes(kubectl, "calm"), STEPS, INTERVAL)
    says_what_happened(run, chaos, STEPS)
    assert run.uids == pods
    assert {pod["status"]["containerStatuses"][0]["restartCount"] for pod in kubectl.pods("chaos")} == {0}
    (attempt,) = run.seen_status["attempts"]
    assert any(attempt["lastRestartInPlace"].startswith(f"rank {rank} (pod ") for rank in chaos.causes[0][-1])
    assert attempt["lastRestartInPlace"].endswith("was killed by signal 9")


def test_an_operator_killed_amid_a_restart_neither_loses_nor_repeats_it(kubectl: Kubectl, operator: Kubectl) -> None:
    """One that an agent decides, one that it orders itself, and one for which it makes a pod again."""

    def kill_operator() -> None:
        operator.run("delete", "pod", "--all", "--grace-period=0", "--force", timeout=150)

    def goes_on(restarts: int) -> None:
        kubectl.wait_for(f"{{.status.attempts[0].restartsInPlace}}={restarts}", "headless")
        kubectl.wait("Running", "headless")
        checkpoint(kubectl, "headless", checkpoint(kubectl, "headless") + 40)

    policy = {"restartStrategy": "InPlace", "progressDeadlineSeconds": 10}
    kubectl.apply(long_job("headless", training={"logging": {"interval": 1}}, runPolicy=policy))
    train_until_a_checkpoint(kubectl, "headless", at_least=40)
    run = OnNodes(kubectl, "headless")
    before = run.uids
    first, second = sorted(before)

    run.ranks()[1].kill()
    kill_operator()
    goes_on(1)
    run.ranks()[0].suspend()
    kubectl.wait("HangSuspected", "headless")
    kill_operator()
    goes_on(2)
    assert run.uids == before
    kubectl("delete", "pod", second, "--grace-period=0", "--force", "--wait=false")
    kubectl.until(lambda: "replacements" in run.seen_status["attempts"][0], "it is replaced", job="headless")
    kill_operator()
    goes_on(3)

    described, (attempt,) = kubectl.describe_job("headless"), run.seen_status["attempts"]
    assert (attempt["restartsInPlace"], run.seen_status["restarts"]) == (3, 1), described
    assert [(entry["pod"], entry["uid"]) for entry in attempt["replacements"]] == [(second, before[second])], described
    after = run.uids
    assert (after.keys(), after[first]) == (before.keys(), before[first]), described
    assert after[second] != before[second]
    # No life has done a step once the next one had begun.
    assert list(lives(run.metrics)) == [(1, generation) for generation in range(4)]
    run.ranks()
    end_soon(kubectl, "headless")
