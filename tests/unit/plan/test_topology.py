"""Which pods belong together, what the scheduler sees of it, and what lets a held pod go."""

from typing import Any

from disttrain_api.mesh import Mesh
from disttrain_api.names import Role
from disttrain_operator.plan.desired import GangPlan
from disttrain_operator.plan.schedulers import release_patch
from disttrain_operator.plan.topology import TopologyPlan
from tests.builders import UID, a_job
from tests.unit.plan.test_pods import SITE

GROUP = "disttrain.io/topology-group"
OWN = {"template": {"spec": {"containers": [{"name": "trainer", "image": "an/image:1"}]}}}


def a_pod(role: Role = Role.WORKER, index: int = 0, *, gated: bool = False, **policy: Any) -> dict[str, Any]:
    job = a_job(
        training=None, workers=OWN, parameterServers={"replicas": 1, **OWN}, runPolicy={"schedulingPolicy": policy}
    )
    return GangPlan(job, 3, SITE).pod(role, index, gated=gated)


def test_pods_share_a_group_where_their_ranks_share_a_tensor_or_pipeline_group() -> None:
    assert Mesh(replicate=4).pods_together(1) == (0, 0, 0, 0), "no such group: the whole job is one"
    assert Mesh(replicate=2, tensor=4).pods_together(4) == (0, 0), "none beyond a pod"
    assert Mesh(replicate=2, tensor=4).pods_together(2) == (0, 0, 1, 1)
    assert Mesh(replicate=4, tensor=2).pods_together(1) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert Mesh(pipeline=2, replicate=4).pods_together(2) == (0, 1, 0, 1)
    assert Mesh(pipeline=2, replicate=2, tensor=2).pods_together(1) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert Mesh(pipeline=2).pods_together(2) == (0,)


def test_a_large_world_is_grouped_as_a_small_one() -> None:
    groups = Mesh(replicate=500, tensor=16).pods_together(8)
    assert groups == tuple(number for number in range(500) for _ in range(2))


def test_workers_of_parameter_servers_share_models_in_their_own_pod_only() -> None:
    settings = {"mode": "ParameterServer", "parameterServer": {"groupReduce": "WithinGroup"}}
    job = a_job(
        workers={"replicas": 4, "processesPerPod": 2},
        parameterServers={"replicas": 1},
        parallelism={"pipelineParallelDegree": 2, "dataParallel": settings},
        runPolicy={"schedulingPolicy": {"topology": {"preferred": "rack"}}},
    )
    plan = GangPlan(job, 1, SITE)
    assert {plan.pod(Role.WORKER, index)["metadata"]["labels"][GROUP] for index in range(4)} == {"0"}


def test_without_a_topology_pods_say_nothing_of_it() -> None:
    pod = a_pod()
    assert GROUP not in pod["metadata"]["labels"]
    assert "affinity" not in pod["spec"]


def test_a_required_topology_is_an_affinity_to_the_pods_of_the_same_attempt() -> None:
    for role in (Role.WORKER, Role.PS):
        pod = a_pod(role, topology={"required": "a/zone"})
        assert pod["metadata"]["labels"][GROUP] == "0"
        (term,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "a/zone"
        selected = term["labelSelector"]["matchLabels"]
        assert selected == {"disttrain.io/job-uid": UID, "disttrain.io/attempt": "3", GROUP: "0"}
        assert selected.items() <= pod["metadata"]["labels"].items(), "the first pod of a group matches itself"


def test_a_preferred_topology_is_a_preference() -> None:
    pod = a_pod(gangScheduler="Volcano", topology={"preferred": "a/rack"})
    (entry,) = pod["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (entry["weight"], entry["podAffinityTerm"]["topologyKey"]) == (100, "a/rack")


def test_the_templates_own_affinity_stays() -> None:
    own = {"nodeAffinity": {"x": 1}, "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"mine": 1}]}}
    template = {"spec": {"affinity": own, "containers": [{"name": "trainer", "image": "an/image:1"}]}}
    policy = {"schedulingPolicy": {"topology": {"required": "a/zone"}}}
    job = a_job(training=None, workers={"template": template}, runPolicy=policy)
    affinity = GangPlan(job, 1, SITE).pod(Role.WORKER, 0)["spec"]["affinity"]
    assert affinity["nodeAffinity"] == {"x": 1}
    assert affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0] == {"mine": 1}
    assert len(affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]) == 2


def test_the_gate_reads_the_label_and_needs_no_affinity() -> None:
    pod = a_pod(gated=True, gangScheduler="Gate", topology={"required": "a/zone"})
    assert pod["metadata"]["labels"][GROUP] == "0"
    assert "affinity" not in pod["spec"]
    assert pod["spec"]["schedulingGates"] == [{"name": "disttrain.io/gang"}]
    assert "schedulingGates" not in a_pod(gangScheduler="Gate")["spec"]


def test_kueue_has_annotations_of_its_own() -> None:
    pod = a_pod(gangScheduler="Kueue", queueName="q", topology={"required": "a/zone"})
    assert GROUP not in pod["metadata"]["labels"]
    assert "affinity" not in pod["spec"]


def test_servers_belong_to_no_group_where_the_workers_have_several() -> None:
    policy = {"schedulingPolicy": {"topology": {"required": "a/zone"}}}
    spec = a_job(training=None, workers={"replicas": 4, **OWN}, parallelism={}, runPolicy=policy).spec
    grouped = spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update={"tensor_parallel_degree": 2})})
    assert [TopologyPlan(grouped, Role.WORKER).label(index)[GROUP] for index in range(4)] == ["0", "0", "1", "1"]
    assert TopologyPlan(grouped, Role.PS).label(0) == {}


def test_a_release_takes_the_gate_away_and_names_the_node_in_every_term() -> None:
    lines = [{"key": "zone", "operator": "Exists"}]
    terms = [
        {"matchExpressions": lines},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod = {
        "metadata": {"uid": "u"},
        "spec": {
            "schedulingGates": [{"name": "other"}, {"name": "disttrain.io/gang"}],
            "affinity": {"nodeAffinity": required},
        },
    }
    patch = release_patch(pod, "a", "2026-01-01T12:00:00Z")
    assert patch["metadata"]["uid"] == "u"
    assert patch["spec"]["schedulingGates"] == [{"name": "other"}]
    node = {"key": "metadata.name", "operator": "In", "values": ["a"]}
    narrowed = patch["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert narrowed["nodeSelectorTerms"] == [
        {"matchExpressions": lines, "matchFields": [node]},
        {"matchFields": [*terms[1]["matchFields"], node]},
    ]
    pod["spec"]["affinity"] = None
    bare = release_patch(pod, "a", "now")["spec"]["affinity"]["nodeAffinity"]
    assert bare["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [{"matchFields": [node]}]
