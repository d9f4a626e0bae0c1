"""`disttrain run job.yaml`: the whole job on this machine, without a cluster."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

from disttrain.extras import lacking
from disttrain.local.folder import RawJob, RunFolder, new_run, to_yaml
from disttrain.local.gpus import gpu_slices
from disttrain.local.kept import modules_of
from disttrain.local.machine import require_room
from disttrain.local.runner import LocalRun, set_suspend
from disttrain.local.summary import exit_code, short, summary
from disttrain.local.view import PlainView, TerminalView, open_view
from disttrain.output import OutputError, print_stderr, show
from disttrain.validate import accepted
from disttrain_api.escape import escaped
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus


def run(path: str, runs: Path, *, yes: bool = False) -> int:
    """Run a manifest as a new job. yes: even one that does not fit this machine."""
    job = accepted(path)
    if job is None:
        return 1
    gpu_slices(job.spec)
    require_room(job.spec, modules_of(job.spec), yes=yes)
    folder, raw = new_run(runs, job)
    return _run(folder, raw)


def resume(path: Path, *, yes: bool = False) -> int:
    """Go on with a job that was suspended or whose runner was killed. yes: as of `run`."""
    folder = RunFolder(path)
    raw = folder.read_job()
    set_suspend(raw, False)
    spec = JobSpec.model_validate(raw["spec"], by_alias=True, by_name=False)
    require_room(spec, modules_of(spec), yes=yes)
    return _run(folder, raw)


def _run(folder: RunFolder, raw: RawJob) -> int:
    spec = JobSpec.model_validate(raw["spec"], by_alias=True, by_name=False)
    slices = gpu_slices(spec)
    with folder.locked(), open_view(raw["metadata"]["name"]) as view:
        status, interrupted_by, unwritten = asyncio.run(_until_the_end(folder, raw, view, slices, modules_of(spec)))
    storage = (spec.storage.url or folder.storage(spec.storage)) if spec.storage else None
    _draw(folder)
    print_stderr(summary(status, folder, storage=storage))
    if unwritten is not None:
        print_stderr(f"disttrain: {short(folder.status_file)} is not up to date: {unwritten}")
    try:
        show(_as_yaml(status))
    except OutputError as lost:
        # The job has ended as it has; only who wants to read of it must look elsewhere.
        print_stderr(f"disttrain: the status is in {short(folder.status_file)} alone: {lost}")
    return exit_code(status, interrupted_by=interrupted_by)


def _as_yaml(status: JobStatus) -> str:
    """The status as kubectl prints it; in ASCII where a character of it might mean something to a terminal."""
    value = {"status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}
    text = to_yaml(value).rstrip("\n")
    return text if escaped(text, lines=True) == text else to_yaml(value, ascii_only=True).rstrip("\n")


def _draw(folder: RunFolder) -> None:
    """Plots of what the run logged; neither a full disk nor a package that lacks is a reason to fail at the end."""
    if lacking(("matplotlib",)) is not None:
        return
    from disttrain.local.plots import draw  # matplotlib takes half a second, which validate need not pay

    with contextlib.suppress(OSError):
        draw(folder.metrics)


def _stop_signals() -> list[signal.Signals]:
    """Return the signals that suspend the job. SIGHUP, a closed terminal, is ignored under nohup."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if nohup else [signal.SIGHUP])]


async def _until_the_end(
    folder: RunFolder, raw: RawJob, view: PlainView | TerminalView, slices: list[str], modules: Sequence[str]
) -> tuple[JobStatus, int | None, str | None]:
    """The last status, the first signal that asked for a stop, and why status.yaml could not be written, if so."""
    job = LocalRun(folder, raw, view, slices, modules)
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        if len(signals) == 1:
            view.log("suspending: the pods write a checkpoint and stop (once more to stop at once)")
            job.suspend()
        else:
            job.stop_now()

    for number in _stop_signals():
        loop.add_signal_handler(number, stop, number)
    status = await job.run()
    return status, signals[0] if signals else None, job.unwritten
