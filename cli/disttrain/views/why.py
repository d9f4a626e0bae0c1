"""Why a job is where it is: (job, pods, events, now) -> one paragraph, and what to do. Pure.

The operator's conditions and verdicts hold the cause; this puts it in its place: since when, what follows, by when.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from disttrain.cluster.remote import RemoteJob
from disttrain.terminal import duration, plain
from disttrain.views.advice import FAILED, PENDING
from disttrain.views.case import (
    Case,
    Raw,
    Why,
    because,
    capital,
    facts_of,
    filled,
    has_storage,
    last_verdict,
    log_commands,
    of_class,
    pods_of,
    restarts_in_place,
    resumes_from,
    todo_of,
    words_of,
)
from disttrain_api.moved import carried_over
from disttrain_api.names import MANAGED_BY_US, Reason
from disttrain_api.status import ConditionType, Verdict
from disttrain_api.times import parse_time
from disttrain_operator.decide.attempt_history import ran, start_must_end_at, why_never_started
from disttrain_operator.decide.observed import PodFacts
from disttrain_operator.decide.pod_events import PULLING

UNSEEN_SECONDS = 15
"""After which a job that no operator has looked at is one that none looks at."""
SLOW_START_SECONDS = 120
STALE_SECONDS = 600
_MANY_RESTARTS = 3
_OF_CLASS = {
    "OutOfMemory": "OOMKilled",
    "OutOfStorage": "StorageLimitExceeded",
    "Program": "RankFailed",
    "Hang": "ProgressDeadlineExceeded",
}


def why(job: RemoteJob, pods: Sequence[Raw], events: Sequence[Raw], now: datetime) -> Why:
    """Return why the job is where it is.

    pods: of all its attempts. events: on the job, and on the pods that have not started, oldest first.
    """
    case = Case(job, [fact for fact in map(facts_of, pods) if fact is not None], events, now)
    if job.holds(ConditionType.COMPLETE):
        return _succeeded(case)
    return _failed(case) if job.holds(ConditionType.FAILED) else _of_a_living_job(case)


def _of_a_living_job(case: Case) -> Why:
    job, status = case.job, case.job.status
    if job.raw["metadata"].get("deletionTimestamp"):
        left = [pod.name for pod in case.pods if pod.pod_alive]
        waits = f"; {len(left)} pods are still ending, for example {left[0]}" if left else ""
        return Why(f"{job.name} is being deleted{waits}.", next=(f"kubectl get pods -n {job.namespace}",))
    manager = (carried_over(job.raw.get("spec"))[0] or {}).get("managedBy")
    if isinstance(manager, str) and manager != MANAGED_BY_US:
        return Why(
            f"{job.name} is left alone by this operator: spec.managedBy names the controller {plain(manager)}.",
            ("Look at that controller, or make the job without `managedBy`",),
        )
    if not status.conditions:
        return _unseen(case)
    running = job.condition(ConditionType.RUNNING)
    if running is not None and running.reason == Reason.OPERATOR_ERROR:
        return _held(case, running.reason, running.message)
    if job.holds(ConditionType.SUSPENDED) or _is_suspending(job):
        return _suspended(case)
    if job.holds(ConditionType.RUNNING):
        return _running(case)
    if job.holds(ConditionType.RESTARTING):
        return _waits_for_a_pod(case) if ran(status) else _restarting(case)
    reason, message = (running.reason, running.message) if running is not None else ("", "")
    return _held(case, reason, message)


def _unseen(case: Case) -> Why:
    job = case.job
    made = job.created
    seconds = (case.now - made).total_seconds() if made is not None else UNSEEN_SECONDS
    if seconds < UNSEEN_SECONDS:
        return Why(f"{job.name} was made {duration(seconds)} ago, and the operator is about to look at it.")
    return Why(
        f"{job.name} was made {duration(seconds)} ago, and no operator has looked at it: none is installed that serves"
        f" namespace {job.namespace}, or none leads.",
        ("`disttrain doctor` looks for the operator and says what to do",),
    )


def _held(case: Case, reason: str, message: str) -> Why:
    """A first start, or one after a suspension, that has not come to an end yet."""
    job, name = case.job, case.job.name
    if reason in ("", Reason.WAITING_FOR_PODS, Reason.POD_INITIALIZING, PULLING):
        return _starting(case)
    if reason == Reason.WAITING_FOR_OLD_PODS:
        return _old_pods(case)
    since = case.since(case.attempt.start_time) if case.attempt is not None else None
    sentences = [f"{name} is pending" + (f" since {since}" if since else "") + f" ({plain(reason)}): {plain(message)}."]
    sentences += _deadline(case, reason)
    advice = PENDING.get(reason)
    if reason in (Reason.UNSCHEDULABLE, Reason.WAITING_FOR_ROOM):
        sentences.append(f"The job needs all of its {pods_of(job)} at once.")
    todo = [filled(advice, job)] if advice else []
    return Why(" ".join(sentences), tuple(todo), (f"disttrain events {name}", f"disttrain describe {name}"))


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


def _is_suspending(job: RemoteJob) -> bool:
    suspended = job.condition(ConditionType.SUSPENDED)
    return suspended is not None and suspended.status != "True" and suspended.reason == Reason.SUSPENDING


def _suspended(case: Case) -> Why:
    job, status = case.job, case.job.status
    saved = (
        f"the last checkpoint is of step {status.checkpoint.step}" if status.checkpoint else "no checkpoint is known"
    )
    if not job.suspend:
        return Why(f"{job.name} was suspended and resumes now: {saved}.", next=(f"disttrain logs -f {job.name}",))
    if _is_suspending(job):
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


def _restarting(case: Case) -> Why:
    job, status = case.job, case.job.status
    running = job.condition(ConditionType.RUNNING)
    verdict, number = last_verdict(case)
    sentences = [f"{job.name} is restarting: attempt {number} ended, because {because(verdict)}."]
    sentences += words_of(case, verdict)
    sentences += of_class(verdict)
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
        sentences.append(
            f"Attempt {status.attempt} does not run yet ({plain(running.reason)}): {plain(running.message)}."
        )
    else:
        started = sum(pod.program_started and pod.awaits_address is None for pod in case.current_pods)
        sentences.append(f"Of attempt {status.attempt} {started} of {pods_of(job)} run.")
    if verdict is not None and why_never_started(status) == verdict:
        sentences += _deadline(case, running.reason if running is not None else "")
    sentences.append(resumes_from(case))
    return Why(" ".join(sentences), todo_of(verdict, job), log_commands(case, number, verdict))


def _waits_for_a_pod(case: Case) -> Why:
    """The ranks of all pods wait for one that was lost."""
    job, running = case.job, case.job.condition(ConditionType.RUNNING)
    reason, message = (running.reason, running.message) if running is not None else ("", "")
    replaced, _ = _replaced(case)
    sentences = [f"{job.name} is restarting within attempt {job.status.attempt}: {plain(message)}."]
    sentences += [replaced] if replaced else []
    sentences.append(resumes_from(case))
    todo = (filled(PENDING[reason], job),) if reason in PENDING else ()
    return Why(" ".join(sentences), todo, (f"disttrain events {job.name}", f"disttrain describe {job.name}"))


def _running(case: Case) -> Why:
    job, status = case.job, case.job.status
    begun = case.since(case.attempt.running_time) if case.attempt is not None else "?"
    sentences = [f"{job.name} runs since {begun} in attempt {status.attempt}: all of its {pods_of(job)} run."]
    todo: list[str] = []
    of_ranks = _hanging_rank, _slow_rank
    for check in (_silent_nodes, *of_ranks, _replaced, _restarted_in_place, _often_restarted, _progress):
        text, advice = check(case)
        sentences += [text] if text else []
        todo += [advice] if advice else []
    if not has_storage(job):
        sentences.append("It has no `storage`: a restart would begin at step 0.")
    return Why(" ".join(sentences), tuple(todo), (f"disttrain logs -f {job.name}", f"disttrain top {job.name}"))


Finding = tuple[str | None, str | None]


def _hanging_rank(case: Case) -> Finding:
    hangs = case.job.condition(ConditionType.HANG_SUSPECTED)
    if hangs is None or hangs.status != "True":
        return None, None
    restarts = case.run_policy.get("progressDeadlineSeconds") is not None
    return f"{capital(plain(hangs.message))}.", (
        "Look at that rank and its node; if no step ends, the job restarts after `runPolicy.progressDeadlineSeconds`"
        if restarts
        else "Look at that rank and its node; nothing restarts the job without `runPolicy.progressDeadlineSeconds`"
    )


def _slow_rank(case: Case) -> Finding:
    slow = case.job.condition(ConditionType.STRAGGLING)
    if slow is None or slow.status != "True":
        return None, None
    return f"{capital(plain(slow.message))}.", (
        "Look at that node (temperature and clock of its GPUs, other programs, its disk), and at whether this rank gets"
        " larger samples than others"
    )


def _silent_nodes(case: Case) -> Finding:
    nodes = sorted({pod.node for pod in case.current_pods if (pod.cut_off or pod.on_lost_node) and pod.node})
    if not nodes:
        return None, None
    listed = ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    return (
        f"Kubernetes has no contact with node {listed}: the ranks there may hang, and with them all others.",
        "Wait: the operator gives a dead node up, and restarts the gang elsewhere; `kubectl get nodes` shows the node",
    )


def _replaced(case: Case) -> Finding:
    replacements = case.attempt.replacements if case.attempt is not None else []
    if not replacements:
        return None, None
    last = replacements[-1]
    when = f"{plain(last.pod)} {case.since(last.time)} ago"
    return f"{len(replacements)} times a single pod was recreated, last {when} ({plain(last.reason)}).", None


def _restarted_in_place(case: Case) -> Finding:
    text = restarts_in_place(case.attempt) if case.attempt is not None else None
    return (None, None) if text is None else (f"In this attempt {text}.", None)


def _often_restarted(case: Case) -> Finding:
    status = case.job.status
    if status.restarts < _MANY_RESTARTS:
        return None, None
    verdict, number = last_verdict(case)
    why_last = f"attempt {number} ended because {because(verdict)}"
    lost = "each time the steps since the last checkpoint are done again"
    advice = filled(FAILED.get(verdict.reason if verdict else "", ""), case.job)
    return f"It is slow since it has restarted {status.restarts} times, and {lost}; {why_last}.", advice or None


def _progress(case: Case) -> Finding:
    progress = case.job.status.progress
    if progress is None:
        return "Its ranks have not reported a step yet; the log shows where they are.", None
    age = f"heard of {case.since(progress.update_time)} ago"
    known = f"The last step that is known is {progress.step} of {progress.total_steps}, {age}"
    rate = f" at {progress.samples_per_second:,.0f} samples/s" if progress.samples_per_second else ""
    moment = parse_time(progress.update_time)
    stale = moment is not None and (case.now - moment).total_seconds() > STALE_SECONDS
    advice = "Look at the log: if it has stopped, a rank hangs or its data is slow" if stale else None
    failed = f" Its evaluation failed: {plain(progress.evaluation_failure)}." if progress.evaluation_failure else ""
    skipped = f" {progress.skipped_steps} steps were skipped." if progress.skipped_steps else ""
    return f"{known}{rate}.{failed}{skipped}", advice


def _failed(case: Case) -> Why:
    job, status = case.job, case.job.status
    failed = job.condition(ConditionType.FAILED)
    reason, message = (failed.reason, failed.message) if failed is not None else ("", "no reason is known")
    verdict, number = last_verdict(case)
    after = f" in attempt {status.attempt}" if status.attempt else " before its first attempt"
    when = f" {case.since(status.completion_time)} ago" if status.completion_time else ""
    sentences = [f"{job.name} failed{when}{after} ({plain(reason)}): {plain(message).rstrip('.')}."]
    sentences += words_of(case, verdict)
    if verdict is not None and verdict.reason == reason:
        sentences += of_class(verdict)
    if status.restarts and reason != Reason.RESTARTS_EXHAUSTED:
        sentences.append(f"Restarts before: {status.restarts}.")
    if status.checkpoint is not None:
        sentences.append(
            f"Its last checkpoint, of step {status.checkpoint.step}, is kept at {plain(status.checkpoint.path)}."
        )
    todo = [filled(FAILED[key], job) for key in _keys(reason, verdict) if key in FAILED]
    return Why(" ".join(sentences), tuple(todo), log_commands(case, number, verdict))


def _keys(reason: str, verdict: Verdict | None) -> list[str]:
    """The reasons to advise on: where restarts are used up, what each of them ended with comes first."""
    if verdict is None or reason != Reason.RESTARTS_EXHAUSTED:
        return [reason]
    return [_OF_CLASS[verdict.class_], reason] if verdict.class_ in _OF_CLASS else [reason]


def _succeeded(case: Case) -> Why:
    job, status = case.job, case.job.status
    start, end = parse_time(status.start_time), parse_time(status.completion_time)
    took = f" after {duration((end - start).total_seconds())}" if start is not None and end is not None else ""
    restarts = f" (restarts: {status.restarts})" if status.restarts else ""
    sentences = [f"{job.name} succeeded{took}{restarts}."]
    if status.progress is not None:
        # The model has not seen the data of these metrics; only a loss has a namesake in training.
        figures = [
            f"{'held-out ' * (metric.name == 'loss')}{plain(metric.name)} {metric.value:.4g}"
            for metric in status.progress.metrics
        ]
        loss = [f"loss {status.progress.loss:.4g}"] if status.progress.loss is not None else []
        sentences.append(f"It did {', '.join([f'{status.progress.step} steps', *loss, *figures])}.")
    if status.checkpoint is not None:
        sentences.append(f"Its last checkpoint is at {plain(status.checkpoint.path)}.")
    return Why(" ".join(sentences), next=(f"disttrain logs {job.name}", f"disttrain delete {job.name}"))
