"""What others put beside a job, or under its name, is not the job's: not counted, waited for, deleted or used."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import a_claim_template
from tests.integration.operator_process import JOBS, OperatorProcess, Raw, Team, eventually, running_operator
from tools.cluster.control_plane import ControlPlane

CONTAINER = {"name": "trainer", "image": "registry.example/other:1"}


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, tmp_path_factory.mktemp("operator"), "--network-policies") as started:
        yield started


_numbers = itertools.count()


@pytest.fixture
def victim(control_plane: ControlPlane, operator: OperatorProcess) -> Team:
    return Team(control_plane.api, f"victim-{next(_numbers)}")


def stem(job: Raw) -> str:
    """What the names of the job's children begin with."""
    return f"{job['metadata']['name']}-{job['metadata']['uid'][:5]}"


def labels(job: Raw, **others: str) -> dict[str, str]:
    """The labels of the job's children, which anybody can read."""
    own = {"job-name": job["metadata"]["name"], "job-uid": job["metadata"]["uid"], **others}
    return {"app.kubernetes.io/managed-by": "disttrain"} | {f"disttrain.io/{key}": value for key, value in own.items()}


def reference(job: Raw, **changes: Any) -> list[Raw]:
    """The owner reference of the job's children, with these changes."""
    about = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": about["name"], "uid": about["uid"]}
    return [owner | {"controller": True} | changes]


@pytest.fixture(params=["labels-alone", "owner-in-another-namespace"])
def intruder(request: pytest.FixtureRequest, victim: Team) -> "Intruder":
    """Somebody who makes pods that look like the victim's, one way or another."""
    return Intruder(victim, elsewhere=request.param == "owner-in-another-namespace")


class Intruder:
    """Makes pods with the labels of a victim's pods; in another namespace also with their owner."""

    def __init__(self, victim: Team, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self.team = Team(victim.api, f"beside-{victim.namespace}") if elsewhere else victim

    def pod(self, job: Raw, name: str, attempt: int) -> Raw:
        """A pod that says that it is worker 0 of this attempt."""
        metadata = {
            "name": name,
            "labels": labels(job, role="worker", index="0", attempt=str(attempt)),
            "ownerReferences": reference(job) if self._elsewhere else [],
        }
        path = f"/api/v1/namespaces/{self.team.namespace}/pods"
        return self.team.ask("POST", path, {"metadata": metadata, "spec": {"containers": [CONTAINER]}})

    def remove(self, pod: Raw) -> None:
        self.team.ask("DELETE", self._path(pod), {"gracePeriodSeconds": 0})

    def is_left_alone(self, pod: Raw) -> bool:
        """Whether nobody has deleted the pod."""
        return "deletionTimestamp" not in self.team.ask("GET", self._path(pod))["metadata"]

    def _path(self, pod: Raw) -> str:
        return f"/api/v1/namespaces/{self.team.namespace}/pods/{pod['metadata']['name']}"


def own_pods(team: Team, job: Raw, attempt: int = 1) -> list[Raw]:
    """The pods under the names that the operator gives."""
    return [pod for pod in team.pods(attempt) if pod["metadata"]["name"].startswith(f"{stem(job)}-worker-")]


def wait_until_the_operator_has_seen_all_of_this(team: Team, name: str = "later") -> None:
    """A later job runs: whatever was in the watch before its pods has been acted on."""
    later = team.create(name, workers={"replicas": 1})
    eventually(lambda: own_pods(team, later), lambda: team.status(name))
    team.run(own_pods(team, later))
    team.wait_for("Running", name=name)


def test_a_pod_that_looks_like_one_of_an_older_attempt_holds_no_job(victim: Team, intruder: Intruder) -> None:
    """Red where an owner of another group counts."""
    job = victim.create(suspend=True)
    victim.wait_for("Suspended")
    pod = intruder.pod(job, "intruder", attempt=0)
    wait_until_the_operator_has_seen_all_of_this(victim)
    victim.patch(suspend=False)
    eventually(lambda: len(own_pods(victim, job)) == 2, victim.status)
    victim.run(own_pods(victim, job))
    victim.wait_for("Running", reason="AllPodsRunning")
    assert intruder.is_left_alone(pod)


@pytest.mark.parametrize("code", [0, 1])
def test_a_pod_that_looks_like_the_jobs_and_ends_ends_nothing(victim: Team, intruder: Intruder, code: int) -> None:
    """Red where an owner counts in any namespace, of any kind or group, or though it is no controller."""
    job = victim.create(workers={"replicas": 1})
    eventually(lambda: own_pods(victim, job), victim.status)
    (own,) = own_pods(victim, job)
    victim.run([own])
    victim.wait_for("Running")
    pod = intruder.pod(job, "intruder", attempt=1)
    intruder.team.run([pod])
    intruder.team.finish([pod], code=code)
    wait_until_the_operator_has_seen_all_of_this(victim)
    status = victim.status()
    assert (status["phase"], status["restarts"], status["attempt"]) == ("Running", 0, 1)
    assert [found["metadata"]["uid"] for found in own_pods(victim, job)] == [own["metadata"]["uid"]]
    intruder.remove(pod)
    wait_until_the_operator_has_seen_all_of_this(victim, "latest")
    assert victim.status()["phase"] == "Running"
    victim.finish([own])
    victim.wait_for("Complete")
    (counts,) = victim.status()["replicaStatuses"]
    assert counts == {"role": "worker", "active": 0, "ready": 0, "succeeded": 1, "failed": 0}


def test_a_pod_that_its_owner_is_taken_from_is_the_jobs_no_longer(victim: Team) -> None:
    job = victim.create(workers={"replicas": 1}, runPolicy={"restartBackoffSeconds": 1})
    eventually(lambda: own_pods(victim, job), victim.status)
    (own,) = own_pods(victim, job)
    victim.run([own])
    victim.wait_for("Running")
    path = f"/api/v1/namespaces/{victim.namespace}/pods/{own['metadata']['name']}"
    victim.ask("PATCH", path, {"metadata": {"ownerReferences": None}})
    eventually(lambda: own_pods(victim, job, attempt=2), victim.status)
    assert victim.status()["attempts"][0]["verdict"]["reason"] == "PodLost"
    assert "deletionTimestamp" not in victim.ask("GET", path)["metadata"]


# --- names that others hold ---

POD_GROUP = "scheduling.x-k8s.io"
FOREIGN: dict[str, tuple[str, str, Raw, Raw]] = {
    # what the job asks for; the collection; the name behind the job's; the object
    "Service": ("/api/v1/namespaces/{}/services", "", {"spec": {"ports": [{"port": 1}]}}, {}),
    "PersistentVolumeClaim": (
        "/api/v1/namespaces/{}/persistentvolumeclaims",
        "-checkpoints",
        {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}},
        {"storage": a_claim_template()},
    ),
    "PodDisruptionBudget": (
        "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
        "",
        {"spec": {"minAvailable": 1, "selector": {}}},
        {"runPolicy": {"disruptionBudget": {"minAvailable": 1}}},
    ),
    "PodGroup": (
        f"/apis/{POD_GROUP}/v1alpha1/namespaces/{{}}/podgroups",
        "-a1",
        {"apiVersion": f"{POD_GROUP}/v1alpha1", "kind": "PodGroup", "spec": {"minMember": 1}},
        {"runPolicy": {"schedulingPolicy": {"gangScheduler": "Coscheduling"}}},
    ),
    "NetworkPolicy": (
        "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
        "",
        {"spec": {"podSelector": {}, "ingress": [{}]}},
        {},
    ),
    "Pod": ("/api/v1/namespaces/{}/pods", "-worker-0-a1", {"spec": {"containers": [CONTAINER]}}, {}),
}


@pytest.fixture(scope="module")
def pod_groups(control_plane: ControlPlane) -> Iterator[None]:
    """The kind that coscheduling brings."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup", "listKind": "PodGroupList"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"podgroups.{POD_GROUP}",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins"},
        },
        "spec": {"group": POD_GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }
    definitions, groups = (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        f"/apis/{POD_GROUP}/v1alpha1/podgroups",
    )
    control_plane.api.ensure(definitions, definition)
    eventually(lambda: control_plane.api.ask("GET", groups).status == 200)
    yield
    control_plane.api.ask("DELETE", f"{definitions}/podgroups.{POD_GROUP}")
    eventually(lambda: control_plane.api.ask("GET", groups).status == 404)


@pytest.mark.usefixtures("pod_groups")
@pytest.mark.parametrize("owner", ["nobody", "another-controller"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_object_under_a_name_of_the_job_is_a_conflict_until_it_goes(victim, kind, owner):
    collection, suffix, foreign, spec = FOREIGN[kind]
    job = victim.create(**(spec | {"suspend": True}))
    victim.wait_for("Suspended")
    name, path = f"{stem(job)}{suffix}", collection.format(victim.namespace)
    metadata: Raw = {"name": name, "labels": labels(job)}
    if owner == "another-controller":
        metadata["ownerReferences"] = reference(job, apiVersion="apps/v1", kind="ReplicaSet", name="web", uid="1-2-3")
    elif kind == "PersistentVolumeClaim":
        # A claim that outlives its job has no owner: its labels say whose it is.
        metadata["labels"]["disttrain.io/job-uid"] = "00000000-0000-4000-8000-000000000000"
    made = victim.ask("POST", path, {"metadata": metadata, **foreign})
    victim.patch(suspend=False)
    message = victim.wait_for("Running", status="False", reason="NameConflict")["message"]
    assert message.startswith(f"{kind} {name}: ")
    assert "delete the foreign object or give the job another name" in message
    assert ("ReplicaSet web" in message) == (owner == "another-controller")
    found = victim.ask("GET", f"{path}/{name}")["metadata"]
    assert found["uid"] == made["metadata"]["uid"]
    # Nobody here takes the finalizer of a claim away.
    victim.ask("PATCH", f"{path}/{name}", {"metadata": {"finalizers": None}})
    victim.ask("DELETE", f"{path}/{name}", {"gracePeriodSeconds": 0})
    eventually(lambda: len(own_pods(victim, job)) == 2, victim.status)
    victim.run(own_pods(victim, job))
    victim.wait_for("Running")
    owned = [] if kind == "PersistentVolumeClaim" else reference(job)
    assert victim.ask("GET", f"{path}/{name}")["metadata"].get("ownerReferences", []) == owned


def test_no_secret_that_others_made_beforehand_reaches_the_pods(victim: Team) -> None:
    """Red where the name is that of the other children."""
    job = victim.create(suspend=True)
    victim.wait_for("Suspended")
    path = f"/api/v1/namespaces/{victim.namespace}/secrets"
    poisoned = {"metadata": {"name": stem(job), "labels": labels(job)}, "stringData": {"token": "mine"}}
    victim.ask("POST", path, poisoned)
    victim.patch(suspend=False)
    eventually(lambda: len(own_pods(victim, job)) == 2, victim.status)
    (mounted,) = {
        volume["secret"]["secretName"]
        for pod in own_pods(victim, job)
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    }
    assert mounted != stem(job)
    secret = victim.ask("GET", f"{path}/{mounted}")
    assert secret["metadata"]["ownerReferences"] == reference(job)
    assert secret["immutable"] is True


def test_a_claim_that_outlives_its_job_is_found_again_by_a_new_process(control_plane, operator, victim):
    job = victim.create(storage=a_claim_template())
    pods = victim.wait_for_pods(2)
    victim.run(pods)
    victim.wait_for("Running")
    operator.kill()
    operator.start()
    victim.finish(pods[:1], code=1)
    victim.run(victim.wait_for_pods(2, attempt=2))
    victim.wait_for("Running")
    (claim,) = victim.children("persistentvolumeclaims")
    assert claim["metadata"]["name"] == f"{stem(job)}-checkpoints"
    assert victim.ask("GET", f"{JOBS.format(victim.namespace)}/job")["status"]["restarts"] == 1


# --- the network ---


def selected(team: Team, selector: Raw) -> list[str]:
    """Names of the namespace's pods that the API server finds by a selector of labels."""
    wanted = ",".join(f"{key}={value}" for key, value in selector["matchLabels"].items())
    found = team.ask("GET", f"/api/v1/namespaces/{team.namespace}/pods?labelSelector={wanted}")["items"]
    return sorted(pod["metadata"]["name"] for pod in found)


def test_only_pods_of_the_job_may_reach_its_pods_in_every_attempt(victim: Team) -> None:
    """Red where any pod of the namespace may."""
    job, other = victim.create(), victim.create("other")
    eventually(lambda: len(own_pods(victim, job)) == len(own_pods(victim, other)) == 2, victim.status)
    path = f"/apis/networking.k8s.io/v1/namespaces/{victim.namespace}/networkpolicies/{stem(job)}"
    policy = victim.ask("GET", path)
    assert policy["metadata"]["ownerReferences"] == reference(job), "it goes with the job"
    ((source,),) = (rule.pop("from") for rule in policy["spec"]["ingress"])
    assert policy["spec"]["ingress"] == [{}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert source.keys() == {"podSelector"}
    own = sorted(pod["metadata"]["name"] for pod in own_pods(victim, job))
    assert selected(victim, policy["spec"]["podSelector"]) == selected(victim, source["podSelector"]) == own

    pods = own_pods(victim, job)
    victim.run(pods)
    victim.wait_for("Running")
    victim.ask("DELETE", path)
    victim.finish(pods[:1], code=1)
    eventually(lambda: len(own_pods(victim, job, attempt=2)) == 2, victim.status)
    again = victim.ask("GET", path)
    assert again["metadata"]["uid"] != policy["metadata"]["uid"]
    made = [pod["metadata"]["creationTimestamp"] for pod in own_pods(victim, job, attempt=2)]
    assert again["metadata"]["creationTimestamp"] <= min(made)
