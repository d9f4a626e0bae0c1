"""What `disttrain why` advises, of what no node has, and what of the operator's sentence is advice."""

from typing import Any

import pytest

from disttrain.cluster.remote import RemoteJob
from disttrain.views.why import why
from tests.builders import a_job, a_raw_job, a_raw_pod
from tests.unit.cli.test_why import LATER, failed, held


def a_node(labels: dict[str, str], **allocatable: str) -> dict[str, Any]:
    resources = {"cpu": "8", "memory": "64Gi", "pods": "110"} | allocatable
    return {"metadata": {"name": "node1", "labels": labels}, "status": {"allocatable": resources}}


GPU = "nvidia.com/gpu"
NODES = [a_node({"pool": "cpu"}), a_node({"pool": "v100"}, **{GPU: "4"})]


@pytest.mark.parametrize(
    ("nodes", "selector", "asked", "says", "does"),
    [
        (NODES, {"pool": "a100"}, {}, "no node has the label pool=a100, only cpu, v100", "`nodeSelector`"),
        (NODES, {"zone": "b"}, {}, "no node has the label zone=b.", "`nodeSelector`"),
        (NODES[:1], {}, {GPU: "8"}, "a pod asks for 8 nvidia.com/gpu, and no node has any", "device plugin"),
        (NODES, {}, {GPU: "8"}, "a pod asks for 8 nvidia.com/gpu, and the largest node has 4", "less per pod"),
        (NODES, {}, {"memory": "1Ti"}, "a pod asks for 1Ti memory, and the largest node has 64Gi", "less per pod"),
        (NODES, {"pool": "v100"}, {GPU: "4"}, None, None),
        ([], {"pool": "a100"}, {GPU: "8"}, None, None),
        ([{}], {"pool": "a100"}, {GPU: "8"}, None, None),
    ],
)
def test_what_no_node_has_is_named_since_waiting_does_not_help(nodes, selector, asked, says, does) -> None:
    pod = a_raw_pod(a_job())
    pod["spec"] = {"nodeSelector": selector, "containers": [{"name": "trainer", "resources": {"requests": asked}}]}
    pod["status"] = {"phase": "Pending"}
    found = why(RemoteJob(a_raw_job(status=held("Unschedulable"))), [pod], [], LATER, nodes)
    assert ("Waiting alone does not help" in found.paragraph) is (says is not None)
    if says is not None:
        assert says in found.paragraph
        assert does in found.todo[0]


@pytest.mark.parametrize(
    ("message", "cause", "advice"),
    [
        ("pod a: secret not found; correct the pod template", "pod a: secret not found.", "Correct the pod template"),
        (
            'image "a" cannot be pulled; check the image\'s name and tag, and the pull secret',
            "pulled.",
            "Check the image",
        ),
        ("its claim does not exist; make it, or name another one in the job", "not exist.", "Make it, or name"),
        ("0/3; wait for room, or ask for fewer or smaller pods", "0/3.", "Wait for room"),
        ("something; nobody knows", "something; nobody knows.", ""),
    ],
)
def test_what_the_operator_advises_stands_with_what_to_do(message: str, cause: str, advice: str) -> None:
    for status in (held("InvalidPod", message), failed("InvalidPod")):
        for condition in status["conditions"][:1]:
            condition["message"] = message
        found = why(RemoteJob(a_raw_job(status=status)), [], [], LATER)
        assert cause in found.paragraph
        assert advice in " ".join(found.todo)
        assert not advice or advice[1:] not in found.paragraph
