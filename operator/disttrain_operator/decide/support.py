"""Recreates the other objects of a gang (Secret, claim, PodGroup …) while they are needed, in case they were deleted.

Its Service is watched: it is there, or it is made. Secret, claim, PodGroup and policies are not: while pods do not
start that should, they are asked for once more, at growing intervals. What is there answers that with 409.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from disttrain_api.scheduling import GangScheduler
from disttrain_api.spec import JobSpec
from disttrain_operator.decide.attempt_history import in_attempt
from disttrain_operator.decide.clock import after, earliest
from disttrain_operator.decide.decision import CreateSupport, Transition
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.observed import ReadableJob
from disttrain_operator.plan.identity import child_name

# Pods that have a node for so long and do not start may wait for something that is gone; then once in MOST_SECONDS.
FIRST_SECONDS = (30, 60, 120, 240, 480)
MOST_SECONDS = 300
# These place no pod without its PodGroup.
_SCHEDULED_BY_GROUP = (GangScheduler.VOLCANO, GangScheduler.COSCHEDULING)


def with_support(job: ReadableJob, gang: Gang, transition: Transition, now: datetime) -> Transition:
    """The transition, and with it what its attempt needs and may lack. `gang`: of the transition's status."""
    if not in_attempt(transition.status):
        return transition
    observed = gang.observed
    since = min(_waiting_since(gang), default=None)
    tries, again = (0, None) if since is None else _tries(since, now)
    made = observed.supported if observed.supported and observed.supported[0] == gang.attempt else (gang.attempt, 0)
    why = None
    if child_name(job.name, job.uid) not in observed.services:
        why = "its Service is missing"
    elif tries > made[1]:
        why = "its pods do not start: what they need may be missing"
    transition = replace(transition, requeue_at=earliest(transition.requeue_at, again))
    planned = next((action for action in transition.actions if isinstance(action, CreateSupport)), None)
    if why is None or (planned is not None and tries <= made[1]):
        return transition
    others = [action for action in transition.actions if action is not planned]
    return replace(transition, actions=(CreateSupport(gang.attempt, why, max(tries, made[1])), *others))


def _waiting_since(gang: Gang) -> Iterator[datetime]:
    """Yield since when each pod waits that the operator's objects may keep from starting."""
    attempt = gang.status.attempts[-1]
    begun = gang.released_at or after(attempt.admitted_time or attempt.start_time, 0)
    for pod in gang.unstarted:
        if pod.node is not None:
            yield pod.scheduled_at or begun
        elif not pod.gated and not gang.queued and _placed_with_support(gang.spec):
            yield begun


def _placed_with_support(spec: JobSpec) -> bool:
    """Return whether a scheduler places no pod of the job while its claim or its PodGroup is missing."""
    claims = spec.storage is not None and spec.storage.volume_claim_template is not None
    return claims or spec.run_policy.scheduling_policy.gang_scheduler in _SCHEDULED_BY_GROUP


def _tries(since: datetime, now: datetime) -> tuple[int, datetime]:
    """How often it was to be asked for until now, and when it is the next time. Anybody may have written `since`."""
    waited, last = (now - since).total_seconds(), FIRST_SECONDS[-1]
    if waited < last:
        tries = sum(waited >= seconds for seconds in FIRST_SECONDS)
        return tries, since + timedelta(seconds=FIRST_SECONDS[tries])
    later = int((waited - last) // MOST_SECONDS)
    return len(FIRST_SECONDS) + later, since + timedelta(seconds=last + MOST_SECONDS * (later + 1))
