"""What the scheduler would say of a pod and a node, and how both are read."""

from typing import Any

import pytest

from disttrain_api.names import GANG_GATE
from disttrain_api.ownership import owner_reference
from disttrain_operator.gate.fit import Needs, NodeFacts, Requirement, Taint, Term, Toleration, matches, unfit
from disttrain_operator.gate.quantities import amount, spell
from disttrain_operator.gate.read import cluster_pod, effective_requests, node_facts

NODE = NodeFacts("a", {"cpu": 4000, "pods": 10}, {"zone": "x", "size": "7"})


@pytest.mark.parametrize(
    ("resource", "quantity", "expected"),
    [
        ("cpu", "100m", 100),
        ("cpu", "0.1", 100),
        ("cpu", 2, 2000),
        ("cpu", "1n", 1),
        ("cpu", "1k", 1_000_000),
        ("memory", "1Gi", 2**30),
        ("memory", "1.5Gi", 3 * 2**29),
        ("memory", "128974848", 128974848),
        ("memory", "129e6", 129_000_000),
        ("memory", "129M", 129_000_000),
        ("memory", "1E", 10**18),
        ("memory", "1Ei", 2**60),
        ("memory", "100m", 1),
        ("nvidia.com/gpu", "8", 8),
    ],
)
def test_quantities_are_rounded_up_as_the_scheduler_does(resource: str, quantity: object, expected: int) -> None:
    assert amount(resource, quantity) == expected


def test_what_is_no_quantity_is_an_error() -> None:
    for text in ("", "much", "1.2.3", "5X"):
        with pytest.raises(ValueError, match=f"`cpu` is '{text}', expected a quantity"):
            amount("cpu", text)


def test_quantities_for_people() -> None:
    assert [spell("cpu", 500), spell("cpu", 4000), spell("memory", 2**34), spell("memory", 1000)] == [
        "500m",
        "4",
        "16Gi",
        "1000",
    ]


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        (Requirement("zone", "In", ("x", "y")), True),
        (Requirement("zone", "In", ("y",)), False),
        (Requirement("none", "In", ("y",)), False),
        (Requirement("zone", "NotIn", ("y",)), True),
        (Requirement("none", "NotIn", ("y",)), True),
        (Requirement("zone", "Exists"), True),
        (Requirement("none", "Exists"), False),
        (Requirement("none", "DoesNotExist"), True),
        (Requirement("zone", "DoesNotExist"), False),
        (Requirement("size", "Gt", ("6",)), True),
        (Requirement("size", "Gt", ("7",)), False),
        (Requirement("size", "Lt", ("8",)), True),
        (Requirement("zone", "Gt", ("6",)), False),
        (Requirement("zone", "Like", ("x",)), False),
    ],
)
def test_every_operator_of_node_affinity(line: Requirement, holds: bool) -> None:
    assert matches(Term(labels=(line,)), NODE) is holds


def test_terms_are_alternatives_and_an_empty_one_matches_nothing() -> None:
    assert matches(Term(fields=(Requirement("metadata.name", "In", ("a",)),)), NODE)
    assert not matches(Term(fields=(Requirement("metadata.name", "NotIn", ("a",)),)), NODE)
    assert not matches(Term(), NODE)
    wrong, right = Term(labels=(Requirement("none", "Exists"),)), Term(labels=(Requirement("zone", "Exists"),))
    assert unfit(Needs(terms=(wrong, right)), NODE) is None
    assert unfit(Needs(terms=(wrong,)), NODE) == "do not match the node affinity"
    assert unfit(Needs(terms=()), NODE) == "do not match the node affinity"


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        (Toleration("k", "Equal", "v", "NoSchedule"), True),
        (Toleration("k", "Equal", "v"), True),
        (Toleration("k", "Equal", "w"), False),
        (Toleration("k", "Equal", "v", "NoExecute"), False),
        (Toleration("k", "Exists"), True),
        (Toleration("", "Exists"), True),
        (Toleration("j", "Exists"), False),
    ],
)
def test_taints_need_a_toleration(toleration: Toleration, fits: bool) -> None:
    node = NodeFacts("a", {}, taints=(Taint("k", "NoSchedule", "v"),))
    assert unfit(Needs(), node) == "are tainted k"
    assert (unfit(Needs(tolerations=(toleration,)), node) is None) is fits


def test_a_toleration_is_read_with_the_defaults_of_the_api_server() -> None:
    tolerations = [{"operator": "Exists"}, {"key": "k", "value": "v"}]
    pod = {"metadata": {"uid": "u"}, "spec": {"schedulingGates": [{"name": GANG_GATE}], "tolerations": tolerations}}
    needs = cluster_pod(pod).needs
    assert needs.tolerations == (Toleration("", "Exists"), Toleration("k", "Equal", "v"))


def test_nodes_that_take_no_pods() -> None:
    assert unfit(Needs(), NodeFacts("a", {}, ready=False)) == "are not ready"
    assert unfit(Needs(), NodeFacts("a", {}, unschedulable=True)) == "are cordoned"
    assert unfit(Needs(node_selector=(("zone", "y"),)), NODE) == "do not match the nodeSelector"
    assert unfit(Needs(requests=(("cpu", 4001),)), NODE) == "are too small in cpu"
    everything = Needs(tolerations=(Toleration("", "Exists"),))
    assert unfit(everything, NodeFacts("a", {}, unschedulable=True)) is None


def asks(cpu: str, **others: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu}}, **others}


def test_init_containers_count_where_they_ask_for_more_and_sidecars_stay() -> None:
    def cpu(**spec: Any) -> int:
        return dict(effective_requests(spec)).get("cpu", 0)

    assert cpu(containers=[asks("1"), asks("2")]) == 3000
    assert cpu(containers=[asks("1")], initContainers=[asks("5"), asks("2")]) == 5000
    assert cpu(containers=[asks("1")], initContainers=[asks("2", restartPolicy="Always")]) == 3000
    later = [asks("2", restartPolicy="Always"), asks("4")]
    assert cpu(containers=[asks("1")], initContainers=later) == 6000
    assert cpu(containers=[asks("1")], initContainers=later[::-1]) == 4000
    assert cpu(containers=[asks("1")], overhead={"cpu": "250m"}) == 1250
    assert cpu(containers=[asks("1")], resources={"requests": {"cpu": "8"}}) == 8000
    assert dict(effective_requests({"containers": [{"resources": {"limits": {"x/gpu": "2"}}}]})) == {
        "x/gpu": 2,
        "pods": 1,
    }


def test_pods_are_read_with_what_holds_them() -> None:
    raw: dict[str, Any] = {
        "metadata": {"uid": "u", "namespace": "n", "ownerReferences": [owner_reference("job", "j")]},
        "spec": {"schedulingGates": [{"name": "disttrain.io/gang"}, {"name": "other"}], "priority": 5},
        "status": {"phase": "Pending"},
    }
    pod = cluster_pod(raw)
    assert (pod.gated, pod.others_hold, pod.job, pod.namespace, pod.node, pod.priority) == (
        True,
        True,
        "j",
        "n",
        None,
        5,
    )
    assert pod.needs is not None
    raw["spec"] = {}
    raw["metadata"]["annotations"] = {"disttrain.io/reserved-node": "a"}
    released = cluster_pod(raw)
    assert (released.gated, released.node, released.reserved) == (False, None, "a")
    assert released.needs is not None, "its room may be lost before it has its node"
    raw["spec"] = {"nodeName": "a"}
    bound = cluster_pod(raw)
    assert (bound.node, bound.reserved, bound.needs) == ("a", None, None)
    raw["spec"] = {"nodeName": "b"}
    raw["status"] = {"phase": "Succeeded"}
    assert (cluster_pod(raw).node, cluster_pod(raw).finished) == ("b", True)


def test_nodes_are_read() -> None:
    raw: dict[str, Any] = {
        "metadata": {"name": "a", "labels": {"zone": "x"}},
        "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "unschedulable": True},
        "status": {"allocatable": {"cpu": "2"}, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert node_facts(raw) == NodeFacts("a", {"cpu": 2000}, {"zone": "x"}, (Taint("k", "NoSchedule"),), True, True)
    raw["status"]["conditions"][0]["status"] = "Unknown"
    assert not node_facts(raw).ready
