"""Why a job has failed, or what it came to. Pure."""

from disttrain.terminal import duration, plain
from disttrain.views.advice import advice_on
from disttrain.views.case import Case, Why, capital, filled, last_verdict, log_commands, of_class, words_of
from disttrain_api.names import Reason
from disttrain_api.status import ConditionType
from disttrain_api.times import parse_time
from disttrain_operator.decide.advice import split


def why_failed(case: Case) -> Why:
    job, status = case.job, case.job.status
    failed = job.condition(ConditionType.FAILED)
    reason, message = (failed.reason, failed.message) if failed is not None else ("", "no reason is known")
    verdict, number = last_verdict(case)
    after = f" in attempt {status.attempt}" if status.attempt else " before its first attempt"
    when = f" {case.since(status.completion_time)} ago" if status.completion_time else ""
    what, advised = split(message)
    sentences = [f"{job.name} failed{when}{after} ({plain(reason)}): {plain(what).rstrip('.')}."]
    sentences += words_of(case, verdict)
    if verdict is not None and verdict.reason == reason:
        sentences += of_class(verdict)
    if status.restarts and reason != Reason.RESTARTS_EXHAUSTED:
        sentences.append(f"Restarts before: {status.restarts}.")
    if status.checkpoint is not None:
        sentences.append(
            f"Its last checkpoint, of step {status.checkpoint.step}, is kept at {plain(status.checkpoint.path)}."
        )
    todo = [*map(capital, advised), *(filled(advice, job) for advice in advice_on(reason, verdict))]
    return Why(" ".join(sentences), tuple(todo), log_commands(case, number, verdict))


def why_succeeded(case: Case) -> Why:
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
