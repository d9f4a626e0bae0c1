"""How a job runs, and what is wrong with its ranks. Pure."""

from collections.abc import Mapping

from disttrain.terminal import plain
from disttrain.views.case import (
    Case,
    Finding,
    Why,
    because,
    capital,
    has_storage,
    last_verdict,
    pods_of,
    pods_replaced,
    restarts_in_place,
    todo_of,
)
from disttrain_api.status import ConditionType
from disttrain_api.times import parse_time

STALE_SECONDS = 600
SLOW_DATA_PERCENT = 30
"""A rank that waits for samples for so much of a step is named as one whose data are slow."""
_MANY_RESTARTS = 3


def why_running(case: Case) -> Why:
    job, status = case.job, case.job.status
    begun = case.since(case.attempt.running_time) if case.attempt is not None else "?"
    sentences = [f"{job.name} runs since {begun} in attempt {status.attempt}: all of its {pods_of(job)} run."]
    todo: list[str] = []
    of_ranks = _hanging_rank, _slow_rank, _slow_data
    for check in (_silent_nodes, *of_ranks, pods_replaced, _restarted_in_place, _often_restarted, _progress):
        text, advice = check(case)
        sentences += [text] if text else []
        todo += [advice] if advice else []
    if not has_storage(job):
        sentences.append("It has no `storage`: a restart would begin at step 0.")
    return Why(" ".join(sentences), tuple(todo), (f"disttrain logs -f {job.name}", f"disttrain top {job.name}"))


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


def _slow_data(case: Case) -> Finding:
    progress, training = case.job.status.progress, (case.job.raw.get("spec") or {}).get("training")
    percent = progress.loading_percent if progress is not None else None
    if percent is None or percent < SLOW_DATA_PERCENT:
        return None, None
    now = plain(str(training.get("dataWorkers", 0) if isinstance(training, Mapping) else 0))
    return f"Its data are slow: rank 0 waits for samples in {percent} % of a step.", (
        f"Let more processes read samples ahead (`training.dataWorkers`, now {now}), keep the data nearer to the pods,"
        " or do less per sample"
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
    advice = " ".join(todo_of(verdict, case.job))
    return f"It is slow since it has restarted {status.restarts} times, and {lost}; {why_last}.", advice or None


def _progress(case: Case) -> Finding:
    progress = case.job.status.progress
    if progress is None:
        if "training" not in (case.job.raw.get("spec") or {}) and "progress" not in (case.job.raw.get("spec") or {}):
            return "Its program is its own, and what it does is in its log alone.", None
        return "Its ranks have not reported a step yet; the log shows where they are.", None
    age = f"heard of {case.since(progress.update_time)} ago"
    if progress.last_step_time is not None:
        age = f"logged {case.since(progress.last_step_time)} ago"
    known = f"The last step that is known is {progress.step} of {progress.total_steps}, {age}"
    rate = f" at {progress.samples_per_second:,.0f} samples/s" if progress.samples_per_second else ""
    moment = parse_time(progress.update_time)
    stale = moment is not None and (case.now - moment).total_seconds() > STALE_SECONDS
    advice = "Look at the log: if it has stopped, a rank hangs or its data is slow" if stale else None
    failed = f" Its evaluation failed: {plain(progress.evaluation_failure)}." if progress.evaluation_failure else ""
    skipped = f" {progress.skipped_steps} steps were skipped." if progress.skipped_steps else ""
    if progress.roll_backs:
        skipped += f" The job was rolled back {progress.roll_backs} time{'s' if progress.roll_backs > 1 else ''}."
    return f"{known}{rate}.{failed}{skipped}", advice
