"""Why not all of a job's pods run: it is pending, starts, is suspended or restarts. Pure."""

from collections.abc import Iterator, Mapping
from datetime import timedelta

from disttrain.cluster.remote import RemoteJob
from disttrain.terminal import duration, plain
from disttrain.views.advice import PENDING
from disttrain.views.case import (
    Case,
    Why,
    because,
    capital,
    filled,
    has_storage,
    last_verdict,
    log_commands,
    of_class,
    pods_of,
    pods_replaced,
    resumes_from,
    todo_of,
    words_of,
)
from disttrain_api.names import Reason
from disttrain_api.status import ConditionType
from disttrain_operator.decide.advice import split
from disttrain_operator.decide.attempt_history import start_must_end_at, why_never_started
from disttrain_operator.decide.observed import PodFacts
from disttrain_operator.decide.pod_events import PULLING
from disttrain_operator.decide.refusals import ON_NODES


def why_held(case: Case, reason: str, message: str) -> Why:
    """A first start, or one after a suspension, that has not come to an end yet."""
    job, name = case.job, case.job.name
    if reason in ("", Reason.WAITING_FOR_PODS, Reason.POD_INITIALIZING, PULLING):
        return _starting(case)
    if reason == Reason.WAITING_FOR_OLD_PODS:
        return _old_pods(case)
    since = case.since(case.attempt.start_time) if case.attempt is not None else None
    what, todo = _advised(case, reason, message)
    sentences = [f"{name} is pending" + (f" since {since}" if since else "") + f" ({plain(reason)}): {plain(what)}."]
    sentences += _deadline(case, reason)
    if reason in (Reason.UNSCHEDULABLE, Reason.WAITING_FOR_ROOM):
        sentences.append(f"The job needs all of its {pods_of(job)} at once.")
        sentences += [case.misfit[0]] if case.misfit[0] else []
    return Why(" ".join(sentences), tuple(todo), (f"disttrain events {name}", f"disttrain describe {name}"))


def _advised(case: Case, reason: str, message: str) -> tuple[str, list[str]]:
    """Return the operator's sentence without its advice, and what to do about that reason."""
    what, todo = split(message)
    if reason == Reason.UNSCHEDULABLE and case.misfit[1]:
        # Room may become free, but none that would do.
        todo = [case.misfit[1], *(advice for advice in todo if advice not in ON_NODES)]
    if reason in PENDING and (not todo or reason == Reason.UNSCHEDULABLE):
        todo.append(filled(PENDING[reason], case.job))
    return what, [capital(advice) for advice in todo]


def _deadline(case: Case, reason: str) -> Iterator[str]:
    """By when it must run. A queue's or the gate's waiting has no such end."""
    seconds = case.run_policy.get("startingDeadlineSeconds")
    if case.attempt is None or reason in (Reason.QUEUED, Reason.WAITING_FOR_ROOM):
        return
    if not isinstance(seconds, int):
        yield "It waits for as long as that takes (it has no startingDeadlineSeconds)."
        return
    left = (start_must_end_at(case.job.status, seconds) - case.now).total_seconds()
    yield (
        f"If it does not run within {duration(left)} it fails (startingDeadlineSeconds: {seconds})."
        if left > 0
        else "Its startingDeadlineSeconds are over."
    )


def _starting(case: Case) -> Why:
    job, pods = case.job, case.current_pods
    waiting = [pod for pod in pods if not pod.program_started or pod.awaits_address is not None]
    begun = case.since(case.attempt.start_time) if case.attempt is not None else "?"
    sentence = f"{job.name} is starting since {begun}: {len(pods) - len(waiting)} of {pods_of(job)} run."
    if not waiting:
        return Why(sentence, next=(f"disttrain logs -f {job.name}",))
    first = waiting[0]
    where = f"on node {first.node}" if first.node else "on no node yet"
    event = _event_of(case, first.name)
    text = f" The newest event on it: {event}." if event else ""
    more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    if first.waiting is not None:
        text = f" {plain(first.waiting.reason)}: {plain(first.waiting.message)}.{text}"
    what = "its container does not run yet" if first.awaits_address is None else "looks for the address of worker 0"
    sentence = f"{sentence} Pod {first.name}{more} is {where} and {what}.{text}"
    todo = "The first pod on a node waits until the node has pulled the image, which is minutes for one of gigabytes"
    if first.awaits_address is not None:
        todo = "Most clusters have a new name in their DNS within seconds"
    elif first.waiting is not None and first.waiting.reason == Reason.POD_INITIALIZING:
        todo = "Its init containers run first; `kubectl logs` with `-c` and the name of one shows how far it is"
    commands = (f"kubectl describe pod {first.name} -n {job.namespace}", f"disttrain logs -f {job.name}")
    return Why(" ".join([sentence, *_deadline(case, "")]), (todo,), commands)


def _event_of(case: Case, pod: str) -> str | None:
    """The newest Event on a pod, in words."""
    for event in reversed(case.events):
        about = event.get("involvedObject")
        if isinstance(about, Mapping) and about.get("name") == pod:
            return plain(f"{event.get('reason')}: {event.get('message')}", most=500).rstrip(".")
    return None


def _old_pods(case: Case) -> Why:
    job = case.job
    old = [pod for pod in case.pods if pod.attempt < job.status.attempt and pod.pod_alive]
    sentence = f"{job.name} waits for pods of an earlier attempt to end, since two attempts never run side by side."
    if old:
        first = old[0]
        limit = f", at the latest in {_left(case, first)}" if first.deletion is not None else ""
        where = f" on node {first.node}" if first.node else ""
        sentence += (
            f" {len(old)} are left, for example {first.name}{where}: it may write a checkpoint in its grace{limit}."
        )
    return Why(sentence, ("Nothing: pods that do not end are removed by force after their grace",))


def _left(case: Case, pod: PodFacts) -> str:
    assert pod.deletion is not None
    timeout = case.run_policy.get("terminationTimeoutSeconds")
    end = pod.deletion.deadline + timedelta(seconds=timeout if isinstance(timeout, int) else 60)
    return duration((end - case.now).total_seconds())


def is_suspending(job: RemoteJob) -> bool:
    suspended = job.condition(ConditionType.SUSPENDED)
    return suspended is not None and suspended.status != "True" and suspended.reason == Reason.SUSPENDING


def why_suspended(case: Case) -> Why:
    job, status = case.job, case.job.status
    saved = (
        f"the last checkpoint is of step {status.checkpoint.step}" if status.checkpoint else "no checkpoint is known"
    )
    if not job.suspend:
        return Why(f"{job.name} was suspended and resumes now: {saved}.", next=(f"disttrain logs -f {job.name}",))
    if is_suspending(job):
        left = sum(pod.pod_alive for pod in case.pods)
        return Why(
            f"{job.name} is being suspended: {left} pods write a checkpoint within their grace and stop; {saved}.",
            next=(f"disttrain get {job.name}",),
        )
    stored = "" if has_storage(job) or status.checkpoint else " It has no `storage`, so it will begin at step 0."
    return Why(
        f"{job.name} is suspended (spec.suspend is true): it has no pods, and {saved}.{stored}",
        (f"`disttrain resume {job.name}` resumes it",),
    )


def why_restarting(case: Case) -> Why:
    job, status = case.job, case.job.status
    running = job.condition(ConditionType.RUNNING)
    verdict, number = last_verdict(case)
    sentences = [f"{job.name} is restarting: attempt {number} ended, because {because(verdict)}."]
    sentences += words_of(case, verdict)
    sentences += of_class(verdict)
    waits: list[str] = []
    budget = case.run_policy.get("maxRestarts")
    if isinstance(budget, int) and status.restarts_since_checkpoint:
        sentences.append(
            f"{status.restarts_since_checkpoint} of {budget} restarts without a new checkpoint are used up."
        )
    if running is not None and running.reason == Reason.BACKING_OFF:
        sentences.append(f"{capital(plain(running.message)).rstrip('.')}.")
    elif running is not None and running.reason == Reason.WAITING_FOR_OLD_PODS:
        sentences.append(_old_pods(case).paragraph)
    elif running is not None and running.reason not in (Reason.WAITING_FOR_PODS, Reason.CREATING_PODS):
        what, waits = _advised(case, running.reason, running.message)
        sentences.append(f"Attempt {status.attempt} does not run yet ({plain(running.reason)}): {plain(what)}.")
        sentences += [case.misfit[0]] if case.misfit[0] else []
    else:
        started = sum(pod.program_started and pod.awaits_address is None for pod in case.current_pods)
        sentences.append(f"Of attempt {status.attempt} {started} of {pods_of(job)} run.")
    if verdict is not None and why_never_started(status) == verdict:
        sentences += _deadline(case, running.reason if running is not None else "")
    sentences.append(resumes_from(case))
    todo = dict.fromkeys([*waits, *todo_of(verdict, job)])
    return Why(" ".join(sentences), tuple(todo), log_commands(case, number, verdict))


def why_waiting_for_a_pod(case: Case) -> Why:
    """The ranks of all pods wait for one that was lost."""
    job, running = case.job, case.job.condition(ConditionType.RUNNING)
    reason, message = (running.reason, running.message) if running is not None else ("", "")
    replaced, _ = pods_replaced(case)
    what, todo = _advised(case, reason, message)
    sentences = [f"{job.name} is restarting within attempt {job.status.attempt}: {plain(what)}."]
    sentences += [replaced] if replaced else []
    sentences.append(resumes_from(case))
    return Why(" ".join(sentences), tuple(todo), (f"disttrain events {job.name}", f"disttrain describe {job.name}"))
