"""A node dies as by a power cut, under a gang and under the parameter servers of another job."""

from collections.abc import Iterator

import pytest

from tests.chaos import lives
from tests.e2e.conftest import cluster_command
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import APART, long_job, near, server_job
from tests.e2e.observe import (
    end_soon,
    first_step,
    is_ready,
    pod,
    spare_node,
    train_until_a_checkpoint,
    verdict,
    wait_until_anew,
)
from tests.e2e.on_nodes import OnNodes

SHORT = {"runPolicy": {"terminationTimeoutSeconds": 10}}
SERVERS = ("0", "1")


@pytest.fixture
def node(of_this_machine: None, kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """The one that is to die. Alive again afterwards."""
    chosen = spare_node(kubectl, operator)
    yield chosen
    cluster_command("start-node", chosen)
    kubectl("wait", "--for=condition=Ready", f"node/{chosen}", "--timeout=180s", timeout=200)


def test_a_dead_node_is_noticed_and_left(kubectl: Kubectl, node: str) -> None:
    """The gang begins anew from its checkpoint; of the gang that restarts in place the pod on the node alone is made
    again; of the third job the servers go on, and nobody else stops."""
    kubectl.apply(long_job("gang", workers={"template": APART}))
    in_place, each_step = {"restartStrategy": "InPlace"}, {"logging": {"interval": 1}}
    kubectl.apply(long_job("alone", workers={"template": APART}, runPolicy=in_place, training=each_step))
    servers = {"workers": {"template": near("NotIn", node)}, "parameterServers": {"template": near("In", node)}}
    kubectl.apply(server_job("servers", 500, **servers, **SHORT))
    step = train_until_a_checkpoint(kubectl, "gang")
    train_until_a_checkpoint(kubectl, "servers")
    train_until_a_checkpoint(kubectl, "alone")
    (lost,) = [one for one in kubectl.pods("alone") if one["spec"]["nodeName"] == node]
    victims = {index: pod(kubectl, "servers", "ps", index) for index in SERVERS}
    assert {one["spec"]["nodeName"] for one in victims.values()} == {node}, kubectl.describe_job("servers")
    assert node in {one["spec"]["nodeName"] for one in kubectl.pods("gang")}, kubectl.describe_job("gang")

    cluster_command("kill-node", node)

    found = verdict(kubectl, "gang")
    assert (found["class"], found["node"]) == ("NodeLost", node), kubectl.describe_job("gang")
    kubectl.until(lambda: kubectl.status("alone")["attempts"][0]["replacements"], "a replacement", job="alone")
    assert is_ready(kubectl, node), "Kubernetes notices it later: its grace is 40 s"
    kubectl.until(
        lambda: {one["metadata"]["labels"]["disttrain.io/attempt"] for one in kubectl.pods("gang")} == {"2"},
        "only pods of attempt 2",
        job="gang",
    )
    kubectl.wait("Running", "gang")
    assert node not in {one["spec"]["nodeName"] for one in kubectl.pods("gang")}
    assert first_step(kubectl, "gang", attempt=2) >= step
    assert kubectl.status("gang")["restartsSinceCheckpoint"] == 0
    end_soon(kubectl, "gang")

    index = lost["metadata"]["labels"]["disttrain.io/index"]
    wait_until_anew(kubectl, "alone", "worker", index, lost)
    assert pod(kubectl, "alone", "worker", index)["spec"]["nodeName"] != node
    kubectl.wait_for("{.status.attempts[0].restartsInPlace}=1", "alone")
    kubectl.wait("Running", "alone")
    status = kubectl.status("alone")
    (entry,) = status["attempts"][0]["replacements"]
    assert (entry["uid"], entry["reason"]) == (lost["metadata"]["uid"], "NodeLost"), kubectl.describe_job("alone")
    assert (status["attempt"], status["restartsSinceCheckpoint"]) == (1, 0), kubectl.describe_job("alone")
    run = OnNodes(kubectl, "alone")
    run.until(lambda: (1, 1) in lives(run.metrics), "the ranks take steps again")
    found = lives(run.metrics)
    # It goes on with what the rank that is left had in memory: the step in flight may be done again.
    assert 0 <= min(found[1, 1]) - max(found[1, 0]) <= 2, kubectl.describe_job("alone")
    end_soon(kubectl, "alone")

    for index, victim in victims.items():
        wait_until_anew(kubectl, "servers", "ps", index, victim)
    kubectl.wait("Finished", "servers", patience=1200)
    status = kubectl.status("servers")
    described = kubectl.describe_job("servers")
    assert kubectl.condition("servers", "Complete")["status"] == "True", described
    assert status["attempt"] == 1, described
    replaced = {(entry["pod"], entry["reason"]) for entry in status["attempts"][0]["replacements"]}
    # The workers have waited for them, and a dead node is not the job's fault.
    assert replaced == {(one["metadata"]["name"], "NodeLost") for one in victims.values()}, described
    assert (status["restarts"], status["restartsSinceCheckpoint"]) == (2, 0), described
