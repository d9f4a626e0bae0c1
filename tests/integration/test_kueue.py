"""Jobs in queues of a real Kueue. The test plays scheduler and kubelet; pods are collected as in any cluster."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from disttrain_api.names import QUEUE_NAME_LABEL
from tests.builders import merge
from tests.integration.operator_process import JOBS, Raw, Team, a_spec, eventually, install_crd, running_operator
from tests.integration.release import Release
from tools.cluster.control_plane import ControlPlane
from tools.cluster.kueue import Kueue

pytestmark = pytest.mark.schedulers

NODE = "a-node"
CONTROLLERS = "garbage-collector-controller,pod-garbage-collector-controller,serviceaccount-controller"
# The pod collector marks what was deleted without ever having had a node; it looks every twenty seconds.
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    flags = [f"--controllers={CONTROLLERS}"]
    with ControlPlane(controller_manager=True, controller_manager_flags=flags) as started:
        started.api.ensure("/api/v1/nodes", {"metadata": {"name": NODE}})
        for name, value in (("low", 10), ("high", 1000)):
            started.api.ensure(PRIORITIES, {"metadata": {"name": name}, "value": value})
        install_crd(started.api)
        yield started


@pytest.fixture(scope="module")
def kueue(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    with Kueue(control_plane) as started, running_operator(control_plane, tmp_path_factory.mktemp("operator")):
        started.add_flavor()
        yield started


@dataclass
class QueueTeam(Team):
    """A namespace with a queue. Pods ask for one CPU each."""

    kueue: Kueue

    def a_container(self) -> Raw:
        container: Raw = a_spec()["workers"]["template"]["spec"]["containers"][0]
        return {**container, "resources": {"requests": {"cpu": "1"}}}

    def queue_up(self, name: str = "job", pods: int = 2, priority: str | None = None, **spec: Any) -> Raw:
        policy = {"gangScheduler": "Kueue", "queueName": "research"} | (
            {"priorityClassName": priority} if priority else {}
        )
        wanted = {
            "workers": {"replicas": pods, "template": {"spec": {"containers": [self.a_container()]}}},
            "runPolicy": {"schedulingPolicy": policy, "startingDeadlineSeconds": 3600},
        }
        return self.create(name, **merge(wanted, spec))

    def pods_of(self, name: str, attempt: int) -> list[Raw]:
        return [pod for pod in self.pods(attempt) if pod["metadata"]["labels"]["disttrain.io/job-name"] == name]

    def wait_for_admission(self, name: str = "job", attempt: int = 1, pods: int = 2) -> list[Raw]:
        """The pods whose gates are gone."""

        def free() -> list[Raw]:
            return [pod for pod in self.pods_of(name, attempt) if not pod["spec"].get("schedulingGates")]

        eventually(
            lambda: len(free()) == pods, lambda: [self.status(name)["phase"], self.kueue.conditions(self.namespace)]
        )
        return free()

    def schedule_and_run(self, pods: list[Raw]) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": NODE}}
            self.ask("POST", f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding", binding)
        self.run(pods)

    def end_what_is_deleted(self, code: int = 143) -> list[str]:
        """A kubelet ends pods that are being deleted: status first, then the object, as far as finalizers let it."""
        ended = [
            pod
            for pod in self.pods()
            if "deletionTimestamp" in pod["metadata"]
            and pod["spec"].get("nodeName")
            and pod["metadata"]["deletionGracePeriodSeconds"]
        ]
        self.finish(ended, code)
        for pod in ended:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
            self.api.ask("DELETE", path, {"gracePeriodSeconds": 0})
        return [pod["metadata"]["name"] for pod in ended]

    def left_over(self) -> list[Any]:
        return [
            [pod["metadata"]["name"], pod["metadata"].get("finalizers"), pod["status"].get("phase")]
            for pod in self.pods()
        ]


@pytest.fixture
def team(control_plane: ControlPlane, kueue: Kueue, request: pytest.FixtureRequest) -> QueueTeam:
    name = request.node.name.removeprefix("test_").replace("_", "-")
    made = QueueTeam(control_plane.api, name[:40].strip("-"), kueue)
    kueue.add_queue(made.namespace, "research", cpu=2)
    return made


def test_a_gang_that_fits_is_let_in_runs_completes_and_leaves_nothing_behind(team: QueueTeam) -> None:
    job = team.queue_up()
    pods = team.wait_for_admission()
    (workload,) = team.kueue.workloads(team.namespace)
    assert workload["metadata"]["name"] == f"job-{job['metadata']['uid'][:5]}-a1"
    assert sum(part["count"] for part in workload["spec"]["podSets"]) == 2
    team.schedule_and_run(pods)
    team.wait_for("Running", reason="AllPodsRunning")
    assert team.status()["attempts"][0]["admittedTime"]
    team.finish(team.pods(1))
    team.wait_for("Complete")
    eventually(lambda: all(not pod["metadata"].get("finalizers") for pod in team.pods()), team.left_over)
    team.delete()
    eventually(lambda: not team.pods() and not team.kueue.workloads(team.namespace), team.left_over)


def test_a_gang_that_does_not_fit_waits_as_a_whole_and_its_job_says_so(team: QueueTeam) -> None:
    team.queue_up("first")
    running = team.wait_for_admission("first")
    team.schedule_and_run(running)
    team.queue_up("second", runPolicy={"startingDeadlineSeconds": 1})
    waiting = team.wait_for("Running", status="False", reason="Queued", name="second")
    assert "waiting in queue research of Kueue" in waiting["message"]
    assert all(pod["spec"]["schedulingGates"] for pod in team.pods_of("second", 1))
    team.finish(running)
    team.schedule_and_run(team.wait_for_admission("second"))
    team.wait_for("Running", name="second")


def test_a_preempted_gang_restarts_uncounted_and_comes_back_when_there_is_room(team: QueueTeam) -> None:
    team.queue_up("meek", priority="low")
    team.schedule_and_run(team.wait_for_admission("meek"))
    team.wait_for("Running", name="meek")
    team.queue_up("strong", priority="high")
    eventually(lambda: len(team.end_what_is_deleted()) > 0, team.left_over)

    def preempted() -> Any:
        team.end_what_is_deleted()
        return team.status("meek").get("attempt") == 2

    eventually(preempted, lambda: [team.status("meek"), team.left_over()])
    status = team.status("meek")
    verdict = status["attempts"][0]["verdict"]
    assert (verdict["reason"], verdict["class"]) == ("Preempted", "Disruption")
    assert verdict["action"] == "RestartWithoutCounting"
    assert status.get("restartsSinceCheckpoint", 0) == 0
    team.wait_for("Running", status="False", reason="Queued", name="meek")
    strong = team.wait_for_admission("strong")
    team.schedule_and_run(strong)
    eventually(lambda: not team.pods_of("meek", 1), team.left_over)
    team.finish(strong)
    team.schedule_and_run(team.wait_for_admission("meek", attempt=2))
    team.wait_for("Running", name="meek")


def test_a_job_suspended_or_deleted_in_the_queue_leaves_no_pod_behind(team: QueueTeam) -> None:
    team.queue_up(pods=3)
    team.wait_for("Running", status="False", reason="Queued")
    team.patch(suspend=True)
    team.wait_for("Suspended")
    eventually(lambda: not team.pods(), team.left_over)
    team.patch(suspend=False)
    eventually(lambda: len(team.pods(2)) == 3)
    team.delete()
    eventually(lambda: not team.pods(), team.left_over)
    eventually(lambda: not team.kueue.workloads(team.namespace), team.left_over)


def test_a_label_names_the_queue_and_changes_only_while_the_job_is_suspended(team, control_plane, kueue, tmp_path):
    """With the policy of the chart, as on Kueue's own kinds."""
    Release(control_plane, tmp_path, "labels", "kueue-labels", ("crds.enabled=true",)).apply(
        "templates/queue-label.yaml"
    )
    kueue.add_queue(team.namespace, "other", cpu=2)
    path = f"{JOBS.format(team.namespace)}/job"
    other = {"metadata": {"labels": {QUEUE_NAME_LABEL: "other"}}}

    def queues() -> list[str]:
        return [workload["spec"]["queueName"] for workload in kueue.workloads(team.namespace)]

    container = team.a_container()
    job = {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": "job", "labels": {QUEUE_NAME_LABEL: "research"}},
        "spec": a_spec(workers={"replicas": 2, "template": {"spec": {"containers": [container]}}}),
    }
    team.ask("POST", JOBS.format(team.namespace), job)
    team.schedule_and_run(team.wait_for_admission())
    assert queues() == ["research"]
    answer = team.api.ask("PATCH", path, other)
    assert answer.status == 422
    assert "stays 'research' from the first attempt on, but while the job is suspended" in answer.body.decode()

    team.patch(suspend=True)
    eventually(lambda: team.end_what_is_deleted() or not team.pods_of("job", 1), team.left_over)
    eventually(lambda: not team.pods_of("job", 1), team.left_over)
    team.ask("PATCH", path, other)
    team.patch(suspend=False)
    team.wait_for_admission(attempt=2)
    eventually(lambda: queues() == ["other"], queues)


def test_without_kueue_the_pods_wait_and_the_job_says_why(team: QueueTeam, kueue: Kueue) -> None:
    """A namespace that Kueue does not manage looks the same to pods as no Kueue at all."""
    configurations = "/apis/admissionregistration.k8s.io/v1/{}/{}-webhook-configuration"
    paths = [
        configurations.format("mutatingwebhookconfigurations", "mutating"),
        configurations.format("validatingwebhookconfigurations", "validating"),
    ]
    removed = [team.api.get(path) for path in paths]
    for path in paths:
        team.ask("DELETE", path)
    try:
        team.queue_up()
        condition = team.wait_for("Running", status="False", reason="QueueNotServed")
        assert "integration `pod`" in condition["message"]
        team.delete()
        eventually(lambda: not team.pods())
    finally:
        for path, configuration in zip(paths, removed, strict=True):
            del configuration["metadata"]["resourceVersion"]
            team.ask("POST", path.rpartition("/")[0], configuration)
