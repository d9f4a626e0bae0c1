"""Restarts of ranks in their pods, as an agent reports them: in attempts, as Events, and since when a job recovers."""

from datetime import datetime, timedelta

from disttrain_api.backoff import MAX_BACKOFF_SECONDS
from disttrain_api.bounds import MAX_MESSAGE_BYTES, cut
from disttrain_api.names import Reason, Role
from disttrain_api.report import RestartsInPlace
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_api.times import parse_time
from disttrain_operator.decide.attempt_history import in_attempt, note_restarts_in_place
from disttrain_operator.decide.decision import Event
from disttrain_operator.decide.observed import Observed, PodFacts
from disttrain_operator.decide.verdict import words_of_rank


def learn_restarts(status: JobStatus, observed: Observed, spec: JobSpec) -> JobStatus:
    """The status with how often the ranks of the current attempt have started again in their pods, and why."""
    found = _newest(status, observed)
    if found is None or found[1].count <= restarts_of(status):
        return status
    reporting, restarts = found
    pod = _pod_of(restarts.failure.rank, reporting, observed, spec)
    why = words_of_rank(restarts.failure, pod, quoted=spec.run_policy.failure_log_in_status)
    if where := _where_it_hung(status, restarts, observed):
        why = f"{why}: {where}"
    return note_restarts_in_place(status, restarts.count, cut(why, MAX_MESSAGE_BYTES))


def _where_it_hung(status: JobStatus, restarts: RestartsInPlace, observed: Observed) -> str:
    """Return where the ranks were that the operator had killed for a hang; "" where they have failed otherwise, or
    another operator knows it."""
    hung, order = restarts.failure.reason == Reason.PROGRESS_DEADLINE_EXCEEDED, observed.order
    if not hung or order is None or (order.given.attempt, order.given.generation + 1) != (
        status.attempt, restarts.count
    ):  # fmt: skip
        return ""
    return order.given.why


def restarts_event(before: JobStatus, status: JobStatus) -> tuple[Event, ...]:
    """Return the Event for restarts in place that are new in `status`; none where it has no new ones."""
    if not _grew(before, status):
        return ()
    why, count = status.attempts[-1].last_restart_in_place, restarts_of(status)
    return (Event(Reason.RESTARTED_IN_PLACE, f"{why}; restart {count} in place of its ranks", warning=True),)


def failed_at(before: JobStatus, status: JobStatus, observed: Observed) -> datetime | None:
    """When the ranks failed that have started again since `before`; None: none have."""
    found = _newest(status, observed)
    return parse_time(found[1].time) if found is not None and _grew(before, status) else None


def paused_until(status: JobStatus, observed: Observed) -> datetime | None:
    """When the pause before the last restart in place of the current attempt is over; None: there was none."""
    found = _newest(status, observed)
    failed = parse_time(found[1].time) if found is not None else None
    if found is None or failed is None or not found[1].pause_seconds:
        return None
    return failed + timedelta(seconds=min(found[1].pause_seconds, MAX_BACKOFF_SECONDS))


def _newest(status: JobStatus, observed: Observed) -> tuple[PodFacts, RestartsInPlace] | None:
    """The pod of the current attempt whose agent reports that ranks have started again, with what it reports."""
    if not in_attempt(status):
        return None
    live, found = observed.live, []
    for pod in observed.pods:
        if pod.attempt != status.attempt:
            continue
        if pod.report is not None and pod.report.restarts_in_place is not None:
            found.append((pod, pod.report.restarts_in_place))
        if live is not None and live.restarts_in_place is not None and live.pod_uid == pod.uid:
            found.append((pod, live.restarts_in_place))
    return max(found, key=lambda entry: entry[1].count, default=None)


def _pod_of(rank: int, reporting: PodFacts, observed: Observed, spec: JobSpec) -> PodFacts:
    """The pod of a rank of the reporting pod's attempt; worker 0's agent reports the failures of all workers."""
    place = reporting.attempt, Role.WORKER, rank // spec.workers.ranks_per_pod
    return next((pod for pod in observed.pods if (pod.attempt, pod.role, pod.index) == place), reporting)


def _grew(before: JobStatus, status: JobStatus) -> bool:
    """Whether more is known of the same attempt: what is learned begins none."""
    return restarts_of(status) > restarts_of(before)


def restarts_of(status: JobStatus) -> int:
    """How often the ranks of the last attempt are known to have started again in their pods."""
    return (status.attempts[-1].restarts_in_place or 0) if status.attempts else 0
