"""Pods that must not run on a node: in place of one that was lost with it, while the scheduler takes it for sound."""

from typing import Any

import pytest

from disttrain_api.names import Annotation, Role
from disttrain_operator.plan.desired import GangPlan
from disttrain_operator.plan.node_affinity import REQUIRED
from tests.builders import a_job
from tests.unit.plan.test_pods import SITE

GPU = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
DEAD = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node1", "node9")]


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        ([], [{"matchFields": DEAD}]),
        ([GPU], [GPU | {"matchFields": DEAD}]),
        ([{"matchFields": DEAD[:1]}, {}], [{"matchFields": [DEAD[0], *DEAD]}, {}]),
    ],
    ids=["none", "one", "two, of which one matches no node"],
)
def test_each_term_keeps_the_pod_from_the_dead_nodes(terms: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """A preference does not suffice: to spread the pods counts as much."""
    required = {REQUIRED: {"nodeSelectorTerms": terms}} if terms else {}
    given = {"nodeAffinity": required, "podAffinity": {"a": 1}}
    template = {"spec": {"affinity": given, "containers": [{"name": "trainer"}]}}
    plan = GangPlan(a_job(workers={"template": template}), 1, SITE, ("node2",))
    pod = plan.pod(Role.WORKER, 1, replacement=1, dead=("node1", "node9"))
    affinity = pod["spec"]["affinity"]
    assert pod["metadata"]["annotations"] == {Annotation.NOT_ON: "node1,node9"}
    assert "annotations" not in plan.pod(Role.WORKER, 0)["metadata"]
    preferred = plan.pod(Role.WORKER, 0)["spec"]["affinity"]["nodeAffinity"]
    assert preferred.get(REQUIRED) == required.get(REQUIRED), "the others are as they were"
    assert affinity == {"nodeAffinity": preferred | {REQUIRED: {"nodeSelectorTerms": wanted}}, "podAffinity": {"a": 1}}
