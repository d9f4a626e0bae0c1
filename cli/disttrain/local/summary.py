"""How a run ended, for people: one line, or one block that says why; and the command's exit code."""

import os
from collections.abc import Iterator
from pathlib import Path

from disttrain.local.folder import RunFolder
from disttrain.local.pods import log_tail
from disttrain.terminal import last_lines
from disttrain.views.advice import advice_on
from disttrain.views.goodput import in_words
from disttrain_api.names import PERMANENT
from disttrain_api.status import ConditionType, JobStatus, Verdict
from disttrain_api.times import parse_time
from disttrain_operator.decide.conditions import condition

_SHOWN_LOG_LINES = 15


def exit_code(status: JobStatus, *, interrupted_by: int | None) -> int:
    """0 at success; a permanent exit code of the trainer where there is one; 128 + n suspended by signal n; else 1."""
    if _holds(status, ConditionType.COMPLETE):
        return 0
    if _holds(status, ConditionType.SUSPENDED):
        return 128 + interrupted_by if interrupted_by is not None else 0
    verdict = _verdict(status)
    permanent = verdict is not None and verdict.rank is not None and verdict.exit_code in PERMANENT
    return verdict.exit_code or 1 if permanent and verdict is not None else 1


def summary(status: JobStatus, folder: RunFolder, *, storage: Path | str | None) -> str:
    """Return the summary line of a job."""
    if _holds(status, ConditionType.COMPLETE):
        return " · ".join(["Succeeded", *_figures(status), *_places(folder, storage), *_time(status)])
    if _holds(status, ConditionType.SUSPENDED):
        at = f" · checkpoint at step {status.checkpoint.step}" if status.checkpoint else " · no checkpoint"
        return f"Suspended{at} · resume with: disttrain run --resume {short(folder.path)}"
    return "\n".join(_failure(status, folder))


def _figures(status: JobStatus) -> Iterator[str]:
    if status.restarts:
        yield f"{status.restarts} restart{'s' if status.restarts > 1 else ''}"
    if in_place := sum(attempt.restarts_in_place or 0 for attempt in status.attempts):
        yield f"{in_place} restart{'s' if in_place > 1 else ''} in place"
    if status.progress is None:
        return
    known = status.progress
    for metric in known.metrics:
        # The model has not seen the data of these metrics; only a loss has a namesake in training.
        name = "held-out loss" if metric.name == "loss" else metric.name
        yield f"{name} {metric.value:.4g}"
    if known.evaluation_failure is not None:
        yield known.evaluation_failure
    yield f"{known.step} steps" + (f", {known.skipped_steps} skipped" if known.skipped_steps else "")
    if known.roll_backs:
        yield f"{known.roll_backs} roll-back{'s' if known.roll_backs > 1 else ''}"
    if known.loss is not None:
        yield f"loss {known.loss:.4g}"
    if known.samples_per_second is not None:
        yield f"{known.samples_per_second:,.0f} samples/s"


def _time(status: JobStatus) -> Iterator[str]:
    """Return the goodput of an ended job, in words."""
    end = parse_time(status.completion_time)
    if status.goodput is not None and status.goodput.spent and end is not None:
        yield f"goodput {in_words(status.goodput, end)}"


def _places(folder: RunFolder, storage: Path | str | None) -> Iterator[str]:
    yield f"logs {short(folder.logs)}"
    if any(folder.metrics.glob("*.png")):
        yield f"plots {short(folder.metrics)}"
    if storage is not None:
        yield f"checkpoints {short(storage) if isinstance(storage, Path) else storage}"


def _failure(status: JobStatus, folder: RunFolder) -> Iterator[str]:
    failed = condition(status, ConditionType.FAILED)
    yield f"Failed: {failed.reason if failed else 'Unknown'}"
    yield f"  {failed.message if failed else 'the job did not come to an end'}"
    verdict = _verdict(status)
    # What names a verb looks at a cluster.
    advice = [text for text in advice_on(failed.reason, verdict) if "{name}" not in text] if failed is not None else []
    rest = [*(f"  what to do: {text}" for text in advice), *(f"  {line}" for line in _time(status))]
    if verdict is None or verdict.pod is None:
        yield from rest
        yield f"  logs: {short(folder.logs)}"
        return
    log = folder.log(verdict.pod)
    lines = log_tail(log, 10_000)
    if verdict.rank is not None:
        own = [line for line in lines if line.startswith(f"[rank {verdict.rank}] ")]
        lines = own or lines
    if lines:
        yield "  last lines of its log:"
        yield from (f"    {line}" for line in last_lines(lines, _SHOWN_LOG_LINES))
    yield from rest
    if log.exists():
        yield f"  log: {short(log)}"


def _verdict(status: JobStatus) -> Verdict | None:
    return status.attempts[-1].verdict if status.attempts else None


def _holds(status: JobStatus, type_: ConditionType) -> bool:
    found = condition(status, type_)
    return found is not None and found.status == "True"


def short(path: Path) -> str:
    """A path for people: relative to the current folder where it lies below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
