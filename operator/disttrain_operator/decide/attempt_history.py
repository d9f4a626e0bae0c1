"""A job's attempts in its status: begin, end and count them, and read what they say of restarts."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta

from disttrain_api.backoff import backoff_seconds
from disttrain_api.bounds import MAX_MESSAGE_BYTES, MAX_REASON_LENGTH, cut
from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction, RunPolicy
from disttrain_api.status import Attempt, CheckpointStatus, FailureClass, JobStatus, Replacement, Verdict
from disttrain_api.times import parse_time
from disttrain_operator.decide.clock import after, timestamp

KEPT_ATTEMPTS = 10
KEPT_REPLACEMENTS = 50
KEPT_LOST_NODES = 10
_GOES_ON = timedelta(seconds=60)
"""Who has not noticed a loss does some steps more."""
# Restarts of these are not counted, and a deadline is one over all of them: else it would begin anew with each.
_BEFORE_THE_START = (FailureClass.NOT_STARTED, FailureClass.DISRUPTION, FailureClass.NODE_LOST)


def begin_attempt(status: JobStatus, policy: RunPolicy, now: datetime) -> JobStatus:
    """The next attempt begins."""
    number = status.attempt + 1
    started = timestamp(now)
    attempt = Attempt(number=number, start_time=started, avoided_nodes=suspected_nodes(status, policy, now))
    # Who had succeeded in a former attempt means nothing any more.
    former = _with_current(status, {"succeeded": None}) if status.attempts else status
    changes = {
        "attempt": number,
        "attempts": [*former.attempts, attempt],
        "start_time": status.start_time or started,
    }
    return _with_last_attempts(status.model_copy(update=changes))


def _with_last_attempts(status: JobStatus) -> JobStatus:
    """The status with as many attempts as are kept: the last ones, and the first of those that count as one start."""
    kept, first = status.attempts[-KEPT_ATTEMPTS:], _of_one_start(status)[0]
    return status.model_copy(update={"attempts": kept if first in kept else [first, *kept[1:]]})


def never_started(attempt: Attempt) -> bool:
    """Whether it ended before all of its pods ran, by nothing that a program of its own did."""
    class_ = attempt.verdict.class_ if attempt.verdict is not None else None
    return class_ in _BEFORE_THE_START and attempt.running_time is None


def _of_one_start(status: JobStatus) -> list[Attempt]:
    """The last attempt, and those right before it that never started. Resuming is another start."""
    found, since = status.attempts[-1:], after(status.start_time or "", 0)
    for attempt in reversed(status.attempts[:-1]):
        if not never_started(attempt) or after(attempt.start_time, 0) < since:
            break
        found.insert(0, attempt)
    return found


def why_never_started(status: JobStatus) -> Verdict | None:
    """The verdict over the last attempt that ended, if it never started and the same start goes on."""
    ended = last_ended(status)
    if ended is None or status.start_time is None or ended not in _of_one_start(status):
        return None
    return ended.verdict if never_started(ended) else None


def start_must_end_at(status: JobStatus, seconds: float) -> datetime:
    """When all pods must run that were to start within so many seconds; a queue holds none of them back now.

    Attempts that never started count as one start with the next, without the time for which they were queued.
    """
    first, *others = _of_one_start(status)
    deadline, before = after(first.admitted_time or first.start_time, seconds), first
    for attempt in others:
        if attempt.admitted_time is not None and before.end_time is not None:
            queued = after(attempt.admitted_time, 0) - after(before.end_time, 0)
            deadline += max(queued, timedelta())
        before = attempt
    return deadline


def end_attempt(status: JobStatus, now: datetime, verdict: Verdict) -> JobStatus:
    """The current attempt, if there is one that has not ended, ends."""
    if not in_attempt(status):
        return status
    changes = {"end_time": timestamp(now), "verdict": _bounded(verdict), "checkpoint_step": last_known_step(status)}
    return _with_current(status, changes)


def set_pending_verdict(status: JobStatus, verdict: Verdict) -> JobStatus:
    """The current attempt is judged and ends when its pods have ended."""
    return _with_current(status, {"verdict": _bounded(verdict)})


def pending_verdict(status: JobStatus) -> Verdict | None:
    """The verdict over the current attempt where it is judged and has not ended."""
    return status.attempts[-1].verdict if in_attempt(status) else None


def mark_admitted(status: JobStatus, now: datetime) -> JobStatus:
    """The queue has let the pods of the current attempt go."""
    return _with_current(status, {"admitted_time": timestamp(now)})


def mark_running(status: JobStatus, now: datetime) -> JobStatus:
    """All pods of the current attempt run."""
    return _with_current(status, {"running_time": timestamp(now)})


def mark_succeeded(status: JobStatus, members: str | None) -> JobStatus:
    """These members of the current attempt have succeeded, if there is one that has not ended: for good."""
    if not in_attempt(status) or status.attempts[-1].succeeded == members:
        return status
    return _with_current(status, {"succeeded": members})


def count_restart(status: JobStatus, *, counted: bool) -> JobStatus:
    """One more restart."""
    since = status.restarts_since_checkpoint + counted
    return status.model_copy(update={"restarts": status.restarts + 1, "restarts_since_checkpoint": since})


def record_checkpoint(status: JobStatus, checkpoint: CheckpointStatus, attempt: int) -> JobStatus:
    """A new checkpoint of this attempt is known. If the attempt has ended, its restart came after the checkpoint."""
    status = status.model_copy(update={"checkpoint": checkpoint})
    ended = last_ended(status)
    if ended is None or attempt > ended.number:
        return status
    counted = ended.verdict is not None and ended.verdict.action == FailureAction.RESTART_GANG
    attempts = [
        entry.model_copy(update={"checkpoint_step": checkpoint.step}) if entry is ended else entry
        for entry in status.attempts
    ]
    since = min(status.restarts_since_checkpoint, int(counted))
    return status.model_copy(update={"attempts": attempts, "restarts_since_checkpoint": since})


def renew_budget(status: JobStatus) -> JobStatus:
    """No restart counts any more where there is a checkpoint that was not there at the last of them."""
    known, step = _step_at_last_restart(status), last_known_step(status)
    if step is None or (known is not None and step <= known):
        return status
    return status.model_copy(update={"restarts_since_checkpoint": 0})


def replace_pod(
    status: JobStatus, pod: str, uid: str, reason: str, now: datetime, *, counted: bool, waits: bool
) -> JobStatus:
    """One pod of the current attempt is to be made again, under its name. waits: whether all ranks wait for it."""
    entry = Replacement(
        pod=pod,
        uid=uid,
        time=timestamp(now),
        reason=reason,
        checkpoint_step=last_known_step(status),
        counted=counted,
        step_time=last_step_time(status) if waits else None,
    )
    replacements = [*status.attempts[-1].replacements, entry][-KEPT_REPLACEMENTS:]
    return _with_current(status, {"replacements": replacements})


def last_step_time(status: JobStatus) -> str | None:
    """When a step was last logged, by the rank's clock."""
    return None if status.progress is None else status.progress.last_step_time


def has_gone_on(entry: Replacement, step_time: str | None) -> bool:
    """Return whether ranks that waited for a pod have logged a step since it was made again. step_time: their last."""
    before, judged, last = (parse_time(time) for time in (entry.step_time, entry.time, step_time))
    if before is None or judged is None or last is None:
        return False
    # The ranks' clock may be ahead, and what was known of them late.
    return last >= max(before, judged) + _GOES_ON


def note_restarts_in_place(status: JobStatus, count: int, why: str) -> JobStatus:
    """The ranks of the current attempt have started again in their pods so often, the last time for this reason."""
    return _with_current(status, {"restarts_in_place": count, "last_restart_in_place": why})


def note_slow_node(status: JobStatus, node: str | None, rank: int | None) -> JobStatus:
    """This rank of the current attempt is slow on this node; None: none is."""
    return _with_current(status, {"slow_node": node, "slow_rank": rank})


def in_attempt(status: JobStatus) -> bool:
    """Whether an attempt has begun and not ended."""
    return bool(status.attempts) and status.attempts[-1].end_time is None


def ran(status: JobStatus) -> bool:
    """Whether all pods of the current attempt have run at the same time."""
    return in_attempt(status) and status.attempts[-1].running_time is not None


def last_ended(status: JobStatus) -> Attempt | None:
    """The attempt before the current one, or the last one where none is under way."""
    return next((attempt for attempt in reversed(status.attempts) if attempt.end_time is not None), None)


def revise_verdict(
    status: JobStatus, number: int, verdict: Verdict, policy: RunPolicy, now: datetime, *, given_back: bool
) -> JobStatus:
    """Another verdict over an attempt that has ended; `given_back`: its restart does not count after all.

    An attempt that has begun since avoids the nodes that are suspected by the new verdict.
    """
    attempts = [
        attempt.model_copy(update={"verdict": _bounded(verdict)}) if attempt.number == number else attempt
        for attempt in status.attempts
    ]
    counted = max(0, status.restarts_since_checkpoint - given_back)
    status = status.model_copy(update={"attempts": attempts, "restarts_since_checkpoint": counted})
    if not in_attempt(status):
        return status
    return _with_current(status, {"avoided_nodes": suspected_nodes(status, policy, now)})


def ended_by(status: JobStatus) -> Verdict | None:
    """Why the attempt before the current one ended, or the last one where none is under way."""
    ended = last_ended(status)
    return ended.verdict if ended is not None else None


def restarting(status: JobStatus) -> bool:
    """Whether the next or current attempt exists because the one before it failed, and does not run yet."""
    verdict = ended_by(status)
    return verdict is not None and verdict.reason != Reason.SUSPENDED and not ran(status)


def next_attempt_at(status: JobStatus, policy: RunPolicy) -> datetime | None:
    """When the next attempt may begin after a failure; None: at once.

    The first restart is at once. Each further one without a new checkpoint between them waits twice as long as the one
    before: that also bounds restarts that do not count.
    """
    if in_attempt(status) or not restarting(status):
        return None
    delay = backoff_seconds(attempts_without_progress(status), policy.restart_backoff_seconds)
    end = status.attempts[-1].end_time
    assert end is not None
    return after(end, delay) if delay else None


def attempts_without_progress(status: JobStatus) -> int:
    """How many of the last attempts failed at the same checkpoint."""
    count, step = 0, None
    for attempt in reversed([attempt for attempt in status.attempts if attempt.end_time is not None]):
        failed = attempt.verdict is not None and attempt.verdict.action is not None
        if not failed or (count and attempt.checkpoint_step != step):
            break
        count, step = count + 1, attempt.checkpoint_step
    return count


def replacements_without_progress(status: JobStatus, pod: str) -> int:
    """How often the pod was made again in the current attempt since the last new checkpoint before its last failure, or
    since the ranks that wait for it have gone on."""
    entries = [entry for entry in status.attempts[-1].replacements if entry.pod == pod]
    count = 0
    for entry, following in zip(reversed(entries), [None, *reversed(entries)], strict=False):
        if entry.checkpoint_step != entries[-1].checkpoint_step:
            break
        if following is not None and has_gone_on(entry, following.step_time):
            break
        count += 1
    return count


def suspected_nodes(status: JobStatus, policy: RunPolicy, now: datetime) -> list[str]:
    """Nodes on which enough attempts failed first within the window, or had a slow rank; and the one that the last
    attempt was lost with, of which Kubernetes may not know yet that it is dead."""
    suspicion = policy.node_suspicion
    since = now - timedelta(seconds=suspicion.window_seconds)
    recent = [attempt for attempt in status.attempts if attempt.end_time and after(attempt.end_time, 0) >= since]
    failures = Counter(node for attempt in recent if (node := _failed_node(attempt)) is not None)
    failed = {node for node, count in failures.items() if suspicion.failures and count >= suspicion.failures}
    slow = _slow_nodes(recent) if suspicion.stragglers else set()
    lost = lost_node(status) if suspicion.failures else None
    return sorted(failed | slow | ({lost} if lost else set()))


def _slow_nodes(attempts: Iterable[Attempt]) -> set[str]:
    """Return the nodes that made a rank slow. A rank that is slow on several has more work than the others."""
    nodes: dict[int | None, set[str]] = {}
    for attempt in attempts:
        if attempt.slow_node is not None:
            nodes.setdefault(attempt.slow_rank, set()).add(attempt.slow_node)
    return {node for found in nodes.values() if len(found) == 1 for node in found}


def lost_node(status: JobStatus) -> str | None:
    """The node with which the attempt before the current one was lost."""
    return _node_if_lost(ended_by(status))


def _node_if_lost(verdict: Verdict | None) -> str | None:
    return verdict.node if verdict is not None and verdict.class_ == FailureClass.NODE_LOST else None


def avoid_known_nodes(status: JobStatus, verdict: Verdict, policy: RunPolicy) -> JobStatus:
    """The pod that is made again in the current attempt avoids the node that it was lost with, if it was, and the one
    on which a rank is slow."""
    suspicion, attempt = policy.node_suspicion, status.attempts[-1]
    known = _node_if_lost(verdict) if suspicion.failures else None, attempt.slow_node if suspicion.stragglers else None
    new = [node for node in known if node is not None and node not in attempt.avoided_nodes]
    # The oldest goes: a job may outlive many nodes.
    return (
        _with_current(status, {"avoided_nodes": [*attempt.avoided_nodes, *new][-KEPT_LOST_NODES:]}) if new else status
    )


def _failed_node(attempt: Attempt) -> str | None:
    """The node that may be at fault: a full disk or a broken GPU shows as the program's failure."""
    verdict = attempt.verdict
    at_fault = verdict is not None and (
        verdict.class_ in ("Program", "Killed", "NodeLost") or verdict.reason == Reason.REJECTED
    )
    counted = verdict is not None and verdict.action != FailureAction.FAIL_JOB
    return verdict.node if verdict is not None and at_fault and counted else None


def _step_at_last_restart(status: JobStatus) -> int | None:
    """The newest checkpoint that was known when an attempt ended or a pod was recreated alone."""
    steps = [attempt.checkpoint_step for attempt in status.attempts if attempt.end_time is not None]
    if status.attempts:
        steps += [entry.checkpoint_step for entry in status.attempts[-1].replacements]
    return max((step for step in steps if step is not None), default=None)


def _bounded(verdict: Verdict) -> Verdict:
    """The verdict with words of a length that a status can hold ten of."""
    return verdict.model_copy(
        update={"reason": cut(verdict.reason, MAX_REASON_LENGTH), "message": cut(verdict.message, MAX_MESSAGE_BYTES)}
    )


def last_known_step(status: JobStatus) -> int | None:
    """Step of the last complete checkpoint that is known."""
    return status.checkpoint.step if status.checkpoint is not None else None


def _with_current(status: JobStatus, changes: dict[str, object]) -> JobStatus:
    attempts = [*status.attempts[:-1], status.attempts[-1].model_copy(update=changes)]
    return status.model_copy(update={"attempts": attempts})
