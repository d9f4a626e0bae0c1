"""Kueue's own way to name a queue: a label on the job.

The API server's rules see no labels, so readers of whole jobs look at it: `disttrain validate` and the operator.
"""

from collections.abc import Mapping

from disttrain_api.names import QUEUE_NAME_LABEL
from disttrain_api.scheduling import GangScheduler
from disttrain_api.spec import DistTrainingJob, JobSpec
from disttrain_api.violation import Violation


def queue_label(labels: object) -> dict[str, str]:
    """Return what the labels of an object, however shaped, say about its queue; {} where they name none."""
    queue = labels.get(QUEUE_NAME_LABEL) if isinstance(labels, Mapping) else None
    return {QUEUE_NAME_LABEL: queue} if isinstance(queue, str) else {}


def with_queue_of_label(job: DistTrainingJob) -> tuple[DistTrainingJob, list[Violation]]:
    """Return the job as if the label stood in `schedulingPolicy`, and the problem where that says something else."""
    queue = job.metadata.labels.get(QUEUE_NAME_LABEL)
    policy = job.spec.run_policy.scheduling_policy
    # An empty label names no queue, to Kueue as well.
    if not queue or (policy.gang_scheduler is GangScheduler.KUEUE and policy.queue_name == queue):
        return job, []
    if policy.gang_scheduler is not GangScheduler.NONE or policy.queue_name is not None:
        name = f", queueName {policy.queue_name}" if policy.queue_name else ""
        given = f"gangScheduler {policy.gang_scheduler}{name}"
        message = f"queue '{queue}' conflicts with `schedulingPolicy` ({given}): remove one of the two"
        return job, [Violation(("metadata", "labels", QUEUE_NAME_LABEL), message, queue)]
    placed = policy.model_copy(update={"gang_scheduler": GangScheduler.KUEUE, "queue_name": queue})
    spec: JobSpec = job.spec.model_copy(
        update={"run_policy": job.spec.run_policy.model_copy(update={"scheduling_policy": placed})}
    )
    return job.model_copy(update={"spec": spec}), []
