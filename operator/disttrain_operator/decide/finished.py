"""A finished job: its pods are cleaned up, and after its time to live it is deleted. It never starts again."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import ConditionType
from disttrain_operator.decide.clock import after, earliest
from disttrain_operator.decide.conditions import condition, settle_counts
from disttrain_operator.decide.decision import Decision, DeleteJob
from disttrain_operator.decide.finish import clean_pods
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.progress import learn


def is_finished(job: Job) -> bool:
    """Whether the job has come to either end."""
    finished = condition(job.status, ConditionType.FINISHED)
    return finished is not None and finished.status == "True"


def after_the_end(job: Job, observed: Observed, now: datetime) -> Decision:
    """Return what remains to be done for a finished job. Only the counts and the last reports of its status still
    change."""
    status = job.status
    if not any(pod.program_alive for pod in observed.pods):
        status = settle_counts(learn(status, observed, now))
    cleaning = clean_pods(job.spec, observed, now, status.completion_time)
    ttl = job.spec.ttl_seconds_after_finished if job.spec is not None else None
    if ttl is None or job.status.completion_time is None:
        return Decision("Finished", "the job has finished", status, cleaning.actions, requeue_at=cleaning.requeue_at)
    expires = after(job.status.completion_time, ttl)
    if now < expires:
        again = earliest(expires, cleaning.requeue_at)
        return Decision("Finished", f"the job is deleted at {expires}", status, cleaning.actions, requeue_at=again)
    sentence = f"ttlSecondsAfterFinished ({ttl}) have passed since the job finished"
    return Decision(Reason.TTL_EXPIRED, sentence, status, (*cleaning.actions, DeleteJob(sentence)))
