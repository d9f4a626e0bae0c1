"""What stands still on a cluster, of jobs that restart in place: a node, a pod, an agent, a rank, a collective call, a
loader. What is a fault is named and restarted; what goes on by itself is left alone."""

import json
from typing import Any

import pytest

from tests.chaos import agent_of
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import APART, ONE_THREAD, STORAGE, job, long_job, near
from tests.e2e.observe import checkpoint, disttrain, end_soon, is_ready, spare_node, train_until_a_checkpoint
from tests.e2e.on_nodes import OnNodes, stopped, stopped_node

pytestmark = pytest.mark.usefixtures("of_this_machine")
IN_PLACE = {"restartStrategy": "InPlace"}
WITH_DEADLINE = IN_PLACE | {"progressDeadlineSeconds": 10}
ALARMS = {
    "HangSuspected",
    "NotHanging",
    "RankSlow",
    "RestartedInPlace",
    "PodRestarted",
    "GangRestarted",
    "NodeSuspected",
}


def events(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    """Those of the job itself."""
    found = kubectl.get("events", f"--field-selector=involvedObject.name={name}")["items"]
    return [event for event in found if event["involvedObject"]["kind"] == "DistTrainingJob"]


def attempt_of(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """The job's one attempt."""
    (attempt,) = kubectl.status(name)["attempts"]
    found: dict[str, Any] = attempt
    return found


def nothing_has_happened(kubectl: Kubectl, run: OnNodes, name: str, uids: dict[str, str]) -> None:
    """Assert that a job has its pods, and nobody has called anything in it a fault."""
    status, attempt = kubectl.status(name), attempt_of(kubectl, name)
    described = kubectl.describe_job(name)
    assert run.uids == uids, described
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0), described
    assert not any(attempt.get(key) for key in ("restartsInPlace", "replacements", "verdict", "avoidedNodes")), (
        described
    )
    assert ALARMS.isdisjoint(event["reason"] for event in events(kubectl, name)), described
    assert kubectl.condition(name, "HangSuspected").get("status", "False") == "False", described


def test_a_node_that_stands_still_for_a_while_is_no_fault_and_a_rank_that_does_is_one(
    kubectl: Kubectl, operator: Kubectl
) -> None:
    kubectl.apply(long_job("still", workers={"template": APART}, runPolicy=WITH_DEADLINE))
    train_until_a_checkpoint(kubectl, "still", at_least=40)
    kubectl.wait_for("{.status.checkpoint.step}", "still")
    run, node = OnNodes(kubectl, "still"), spare_node(kubectl, operator)
    uids = run.uids
    assert node in {pod["spec"]["nodeName"] for pod in kubectl.pods("still")}
    with stopped_node(node):
        kubectl.until(lambda: not is_ready(kubectl, node), "Kubernetes misses the node", job="still")
    kubectl.until(lambda: is_ready(kubectl, node), "the node is ready again", job="still")
    kept = checkpoint(kubectl, "still")
    kubectl.until(
        lambda: kubectl.status("still")["checkpoint"]["step"] >= kept + 80, "it goes on, and says so", job="still"
    )
    nothing_has_happened(kubectl, run, "still", uids)

    ranks = run.ranks()
    ranks[1].suspend()
    kubectl.wait_for("{.status.attempts[0].restartsInPlace}=1", "still")
    kept = checkpoint(kubectl, "still")
    checkpoint(kubectl, "still", at_least=kept + 80)
    attempt, described = attempt_of(kubectl, "still"), kubectl.describe_job("still")
    assert attempt["lastRestartInPlace"].startswith("rank 1 (pod "), described
    assert "was killed by its agent, since no rank did a step" in attempt["lastRestartInPlace"], described
    assert run.uids == uids, described
    assert (attempt["number"], kubectl.status("still")["restarts"]) == (1, 0), described
    (named,) = [event["message"] for event in events(kubectl, "still") if event["reason"] == "HangSuspected"]
    assert "is stopped by a signal" in named
    (pod,) = [name for name in uids if "-worker-1-" in name]
    assert named.startswith(f"rank 1 (pod {pod} "), named
    assert not ranks[1].is_running()
    end_soon(kubectl, "still")


def test_a_stopped_agent_is_left_alone_until_its_rank_fails_and_a_stopped_pod_is_recreated_alone(
    kubectl: Kubectl, operator: Kubectl
) -> None:
    """On one node: the agent of the other pod answers, so that the node is known to be well."""
    template = near("In", spare_node(kubectl, operator))
    kubectl.apply(long_job("stopped", workers={"template": template}, runPolicy=IN_PLACE))
    kept = train_until_a_checkpoint(kubectl, "stopped", at_least=40)
    assert len({pod["spec"]["nodeName"] for pod in kubectl.pods("stopped")}) == 1
    run = OnNodes(kubectl, "stopped")
    uids = run.uids
    names = sorted(uids)
    for rank in run.ranks().values():
        with stopped([agent_of(rank)]):
            kept = checkpoint(kubectl, "stopped", at_least=kept + 80)
    kubectl.until(lambda: kubectl.status("stopped")["checkpoint"]["step"] >= kept, "the agent says so", job="stopped")
    nothing_has_happened(kubectl, run, "stopped", uids)

    for pod, whole in ((0, False), (1, True)):
        ranks, before = run.ranks(), run.uids
        agent = agent_of(ranks[pod])
        for process in [agent, *(agent.children(recursive=True) if whole else [])]:
            process.suspend()
        if not whole:
            ranks[pod].kill()
        kubectl.wait_for(f"{{.status.attempts[0].restartsInPlace}}={pod + 1}", "stopped")
        kubectl.wait("Running", "stopped")
        kept = checkpoint(kubectl, "stopped")
        checkpoint(kubectl, "stopped", at_least=kept + 80)
        status, described = kubectl.status("stopped"), kubectl.describe_job("stopped")
        (attempt,) = status["attempts"]
        replaced = attempt["replacements"][-1]
        assert (replaced["pod"], replaced["uid"], replaced["reason"]) == (
            names[pod],
            before[names[pod]],
            "PodSilent",
        ), described
        assert (status["attempt"], status["restarts"], status["phase"]) == (1, pod + 1, "Running"), described
        after, other = run.uids, names[1 - pod]
        assert after[other] == before[other], described
        assert after[names[pod]] != before[names[pod]], described
    end_soon(kubectl, "stopped")


DEADLOCK = """
import os
import time

import torch
import torch.distributed as dist

import disttrain


def sum_gradients(numbers):
    dist.all_reduce(numbers)


def share_score(numbers, group):
    dist.broadcast(numbers, src=0, group=group)


with disttrain.session(steps=60, checkpoint_interval=10) as session:
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    session.restore(model=model, optimizer=optimizer)
    numbers, of_scores = torch.ones(1), dist.new_group()
    while not session.finished:
        time.sleep(0.05)
        if session.completed == 25 and os.environ["DISTTRAIN_GENERATION"] == "0":
            share_score(numbers, of_scores) if session.rank == 1 else sum_gradients(numbers)
        loss = model(torch.ones(1, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.step(loss=loss)
"""


def test_ranks_that_wait_for_each_other_are_named_and_start_again_from_the_checkpoint(kubectl: Kubectl) -> None:
    kubectl("create", "configmap", "loop", f"--from-literal=loop.py={DEADLOCK}")
    container = {"name": "trainer", "env": ONE_THREAD["spec"]["containers"][0]["env"]}
    container["volumeMounts"] = [{"name": "loop", "mountPath": "/loop"}]
    template = {"spec": {"containers": [container], "volumes": [{"name": "loop", "configMap": {"name": "loop"}}]}}
    workers = {"replicas": 2, "image": TRAINER_IMAGE, "template": template, "command": ["python", "/loop/loop.py"]}
    kubectl.apply(job("deadlock", {"workers": workers, "storage": STORAGE, "runPolicy": WITH_DEADLINE}))
    kubectl.wait("Running", "deadlock")
    run = OnNodes(kubectl, "deadlock")
    uids = run.uids
    kubectl.wait("Finished", "deadlock")
    described = kubectl.describe_job("deadlock")
    status, attempt = kubectl.status("deadlock"), attempt_of(kubectl, "deadlock")
    assert kubectl.condition("deadlock", "Complete")["status"] == "True", described
    assert (status["attempt"], status["restarts"], attempt["restartsInPlace"]) == (1, 0, 1), described
    assert "was killed by its agent, since no rank did a step" in attempt["lastRestartInPlace"], described
    assert run.uids == uids, described
    said = {event["reason"]: event["message"] for event in events(kubectl, "deadlock")}
    assert "NotHanging" not in said, "they have not got on: they were killed"
    for reason in ("HangSuspected", "ProgressDeadlineExceeded"):
        message = said[reason]
        assert "rank 0 waits in all_reduce (distributed_c10d.py:" in message, message
        assert "< sum_gradients (loop.py:" in message, message
        assert "rank 1 waits in broadcast (distributed_c10d.py:" in message, message
        assert "< share_score (loop.py:" in message, message
        assert "they wait for each other" in message, message
    assert "resuming after step 20 " in run.log(0, 1), described


def test_a_loader_that_is_late_is_no_hang_and_data_that_are_slow_are_said_to_be(kubectl: Kubectl) -> None:
    """Longer than the deadline, and than its own steps by far; the other rank waits for it in a collective call."""
    data = {"entrypoint": "slow_data:images_late_once", "config": {"seconds": 0.002, "after": 1600, "pause": 30}}
    kubectl.apply(long_job("late", training={"data": data}, runPolicy=WITH_DEADLINE))
    kubectl.wait("Running", "late")
    run = OnNodes(kubectl, "late")
    uids = run.uids
    (second,) = [name for name in uids if "-worker-1-" in name]
    kubectl.wait_for_log(second, r"rank 1 waits 30 s for a sample", job="late")
    kubectl.wait_for("{.status.checkpoint.step}", "late")
    kept = kubectl.status("late")["checkpoint"]["step"]
    kubectl.until(lambda: kubectl.status("late")["checkpoint"]["step"] >= kept + 80, "it goes on", job="late")
    nothing_has_happened(kubectl, run, "late", uids)
    percent = kubectl.status("late")["progress"]["loadingPercent"]
    assert percent >= 30, json.dumps(kubectl.status("late")["progress"])
    assert "Its data are slow: rank 0 waits for samples in " in disttrain(kubectl, "why", "late")
    end_soon(kubectl, "late")
