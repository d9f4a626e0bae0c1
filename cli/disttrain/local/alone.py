"""A job as this machine runs it: without scheduler, other controllers or disruptions.

Its status is read by whoever reads its logs: it says what programs printed.
"""

from dataclasses import replace

from disttrain_api.scheduling import GangScheduler, SchedulingPolicy
from disttrain_operator.decide.observed import Job


def alone(job: Job) -> tuple[Job, list[str]]:
    """The job without what a cluster does with it, and the fields that were taken away."""
    if job.spec is None:
        return job, []
    policy = job.spec.run_policy
    taken = []
    if policy.scheduling_policy != SchedulingPolicy():
        taken.append("schedulingPolicy")
    if policy.disruption_budget is not None:
        taken.append("disruptionBudget")
    if job.managed_by is not None:
        taken.append("managedBy")
    if job.spec.ttl_seconds_after_finished is not None:
        # The folder of a run stays until a person removes it.
        taken.append("ttlSecondsAfterFinished")
    here = {
        "failure_log_in_status": True,
        "scheduling_policy": SchedulingPolicy(gang_scheduler=GangScheduler.NONE),
        "disruption_budget": None,
    }
    changes = {
        "run_policy": policy.model_copy(update=here),
        "managed_by": None,
        "ttl_seconds_after_finished": None,
    }
    spec = job.spec.model_copy(update=changes)
    return replace(job, spec=spec, managed_by=None), taken
