"""A job that names its queue by Kueue's label."""

import pytest

from disttrain_api.scheduling import GangScheduler
from disttrain_api.validate import problems, read_job, read_spec
from tests.builders import a_manifest

QUEUE = "kueue.x-k8s.io/queue-name"


def labelled(value: object = "research", **policy: object) -> dict[str, object]:
    """A manifest with the label and this scheduling policy."""
    manifest = a_manifest(runPolicy={"schedulingPolicy": policy})
    manifest["metadata"]["labels"] = {QUEUE: value}
    return manifest


@pytest.mark.parametrize("policy", [{}, {"gangScheduler": "Kueue", "queueName": "research"}])
def test_the_label_names_the_queue(policy: dict[str, object]) -> None:
    job, found = read_job(labelled(**policy))
    assert found == []
    placed = job.spec.run_policy.scheduling_policy
    assert (placed.gang_scheduler, placed.queue_name) == (GangScheduler.KUEUE, "research")


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ({"gangScheduler": "Gate"}, "gangScheduler Gate"),
        ({"gangScheduler": "Volcano", "queueName": "research"}, "gangScheduler Volcano, queueName research"),
        ({"gangScheduler": "Kueue", "queueName": "other"}, "gangScheduler Kueue, queueName other"),
    ],
)
def test_a_label_beside_another_scheduler_or_queue_is_refused(policy: dict[str, object], given: str) -> None:
    (problem,) = problems(labelled(**policy))
    assert str(problem) == (
        f"metadata.labels['{QUEUE}']: queue 'research' conflicts with `schedulingPolicy` ({given}): remove one of the"
        " two"
    )


def test_rules_see_the_queue_that_the_label_names() -> None:
    manifest = labelled()
    manifest["spec"] = {
        "workers": {"image": "a:1"},
        "runPolicy": {"failurePolicy": {"rules": [{"action": "RestartPod"}]}},
    }
    (problem,) = problems(manifest)
    assert "RestartPod conflicts with `gangScheduler` Kueue" in problem.message


@pytest.mark.parametrize("labels", [None, [], "x", {QUEUE: 7}, {QUEUE: None}, {QUEUE: ""}, {"other": "research"}])
def test_labels_of_any_shape_that_name_no_queue_change_nothing(labels: object) -> None:
    spec, found = read_spec(a_manifest()["spec"], labels)
    assert found == []
    assert spec.run_policy.scheduling_policy.gang_scheduler is GangScheduler.NONE
