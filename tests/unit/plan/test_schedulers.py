"""What an attempt tells those who place its pods, and those who drain nodes."""

from typing import Any

import pytest

from disttrain_api.names import Role
from disttrain_operator.decide.observed import Job
from disttrain_operator.plan.desired import GangPlan, disruption_budget, pod, pod_group
from tests.builders import UID, a_job
from tests.unit.plan.test_pods import SITE

COMMAND = {"spec": {"containers": [{"name": "trainer", "image": "mine:1", "command": ["train"]}]}}


def a_gang(gang: str, template: dict[str, Any] | None = None, **policy: Any) -> Job:
    """Three workers and two servers, six lives of them."""
    own = COMMAND if template is None else {**COMMAND, **template}
    return a_job(
        training=None,
        workers={"replicas": 3, "template": own},
        parameterServers={"replicas": 2, "template": own},
        runPolicy={"schedulingPolicy": {"gangScheduler": gang, **policy}},
    )


def members(job: Job, attempt: int) -> list[dict[str, Any]]:
    plan = GangPlan(job, attempt, SITE)
    return [plan.pod(Role.WORKER, 0), plan.pod(Role.WORKER, 2), plan.pod(Role.PS, 1)]


def test_all_pods_of_an_attempt_are_one_group_of_a_queue() -> None:
    for manifest in members(a_gang("Kueue", queueName="research"), 6):
        metadata = manifest["metadata"]
        assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "digits-3f9a1-a6"
        assert metadata["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": "5",
            "kueue.x-k8s.io/retriable-in-group": "false",
        }
        assert manifest["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
        assert "schedulerName" not in manifest["spec"]


def test_what_the_template_says_of_labels_annotations_and_gates_stays() -> None:
    template = {
        "metadata": {"labels": {"kueue.x-k8s.io/priority-class": "high"}, "annotations": {"mine": "yes"}},
        "spec": {**COMMAND["spec"], "schedulingGates": [{"name": "mine.example/hold"}]},
    }
    for manifest in members(a_gang("Kueue", template, queueName="research"), 1):
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
        assert manifest["metadata"]["annotations"]["mine"] == "yes"
        assert [gate["name"] for gate in manifest["spec"]["schedulingGates"]] == [
            "mine.example/hold",
            "kueue.x-k8s.io/admission",
        ]


@pytest.mark.parametrize("how", ["required", "preferred"])
def test_a_queue_puts_the_workers_together_in_the_order_of_their_ranks(how: str) -> None:
    job = a_gang("Kueue", queueName="research", topology={how: "example.com/rack"})
    worker, _, server = (manifest["metadata"]["annotations"] for manifest in members(job, 1))
    assert worker[f"kueue.x-k8s.io/podset-{how}-topology"] == "example.com/rack"
    assert worker["kueue.x-k8s.io/pod-group-pod-index-label"] == "disttrain.io/index"
    assert not [key for key in server if "topology" in key]


def test_volcano_reads_an_annotation_and_a_pod_group_of_all_pods() -> None:
    job = a_gang("Volcano", queueName="research", priorityClassName="high")
    for manifest in members(job, 2):
        assert manifest["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": "digits-3f9a1-a2"}
        assert manifest["spec"]["schedulerName"] == "volcano"
    group = pod_group(job, 2)
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert group["metadata"]["name"] == "digits-3f9a1-a2"
    assert group["metadata"]["ownerReferences"][0]["uid"] == UID
    assert group["spec"] == {"minMember": 5, "queue": "research", "priorityClassName": "high"}


def test_coscheduling_reads_a_label_and_a_pod_group_with_a_timeout() -> None:
    job = a_gang("Coscheduling", timeoutSeconds=90)
    for manifest in members(job, 2):
        assert manifest["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "digits-3f9a1-a2"
        assert manifest["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
    group = pod_group(job, 2)
    assert group["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert group["spec"] == {"minMember": 5, "scheduleTimeoutSeconds": 90}


@pytest.mark.parametrize("gang", ["Volcano", "Coscheduling"])
def test_the_template_may_name_the_scheduler(gang: str) -> None:
    template = {"spec": {**COMMAND["spec"], "schedulerName": "our-own"}}
    assert {manifest["spec"]["schedulerName"] for manifest in members(a_gang(gang, template), 1)} == {"our-own"}


@pytest.mark.parametrize("gang", ["None", "Kueue"])
def test_others_want_no_pod_group(gang: str) -> None:
    assert pod_group(a_gang(gang), 1) is None


@pytest.mark.parametrize("gang", ["None", "Kueue", "Volcano", "Coscheduling"])
def test_the_priority_class_is_that_of_all_pods(gang: str) -> None:
    job = a_gang(gang, priorityClassName="high", queueName="research")
    assert {manifest["spec"]["priorityClassName"] for manifest in members(job, 1)} == {"high"}


def test_without_a_gang_a_pod_is_nobodys() -> None:
    manifest = pod(a_job(), Role.WORKER, 0, 1, SITE)
    assert not manifest["metadata"].keys() & {"annotations"}
    assert not manifest["spec"].keys() & {"schedulerName", "schedulingGates", "priorityClassName"}


def test_a_disruption_budget_counts_the_pods_of_every_attempt() -> None:
    job = a_job(runPolicy={"disruptionBudget": {"minAvailable": 2}})
    budget = disruption_budget(job)
    assert budget["spec"]["minAvailable"] == 2
    chosen = budget["spec"]["selector"]["matchLabels"].items()
    for attempt in (1, 2):
        assert chosen <= pod(job, Role.WORKER, 0, attempt, SITE)["metadata"]["labels"].items()
    assert budget["metadata"]["ownerReferences"][0]["uid"] == UID


def test_a_job_that_asks_for_no_budget_gets_none() -> None:
    assert disruption_budget(a_job()) is None
