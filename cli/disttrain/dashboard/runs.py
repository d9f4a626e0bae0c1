"""Runs of `disttrain run` on this machine as a source of pages. It reads their folders and takes no lock."""

import itertools
import os
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from disttrain.cluster.remote import RemoteJob
from disttrain.dashboard.metrics_file import MetricsFile
from disttrain.errors import CommandError
from disttrain.local.folder import METRICS_FILE, STATUS_FILE, RawJob, RunFolder
from disttrain.local.progress import LiveProgress
from disttrain.logs.pick import Pick, PodLog, line_of
from disttrain.stacks.of_run import stacks_of_run
from disttrain.views.why import why
from disttrain_agent.environment import report_dir
from disttrain_agent.reports import report_path
from disttrain_api.names import Role
from disttrain_api.report import RankReport
from disttrain_api.status import ConditionType
from disttrain_dashboard.source import INTERRUPTED, Job, Listing, Rank, Seen, SourceError, UnknownJobError
from disttrain_dashboard.views.ranks import MAX_RANKS, ranks_per_pod
from disttrain_operator.plan.identity import pod_name

FIRST_SECONDS = 0.5
READ_SECONDS = 2.0
"""How long the first look, and each after it, reads folders that have changed; the next goes on there."""
MAX_RUNS = 2000
MAX_STATUS_BYTES = 2 * 2**20
LOG_BYTES = 2**20
"""What is read of the end of a log."""
_MAX_CURVES = 16
_NAME = re.compile(r"[a-z0-9][-a-z0-9.]{0,80}")
_REPORT_BYTES = 2**16


@dataclass(frozen=True)
class _Read:
    """A status.yaml as it was read."""

    stamp: tuple[int, int, int]
    raw: RawJob


class LocalRuns:
    """Runs in a folder, the last changed first."""

    seconds = 1.0

    def __init__(self, runs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs.absolute(), clock
        self._read: dict[str, _Read] = {}
        self._curves: OrderedDict[str, MetricsFile] = OrderedDict()
        self.title = f"Runs in {self._runs}"

    def jobs(self) -> Listing:
        """Return the runs that are read so far, and how many are not."""
        stamps = dict(itertools.islice(self._stamps(), MAX_RUNS))
        self._read = {name: read for name, read in self._read.items() if name in stamps}
        until, unread = self._clock() + (READ_SECONDS if self._read else FIRST_SECONDS), 0
        for name, stamp in sorted(stamps.items(), key=lambda entry: entry[1], reverse=True):
            if name not in self._read or self._read[name].stamp != stamp:
                if self._clock() < until:
                    self._read[name] = _Read(stamp, self._load(name, stamp))
                else:
                    unread += 1
        known = sorted(self._read.items(), key=lambda entry: entry[1].stamp, reverse=True)
        locked = _locked_inodes()
        more = f"{unread} of {len(stamps)} runs are still to be read." if unread else ""
        return Listing([self._job(name, read.raw, locked) for name, read in known], more)

    def job(self, key: str) -> Seen:
        """Return a run."""
        folder, raw = self._folder(key), self._raw(key)
        job = self._job(key, raw, _locked_inodes())
        remote = RemoteJob(raw)
        paragraph, todo = _sentences(remote, folder, job.phase, datetime.now(UTC))
        return Seen(
            job, paragraph, todo, ranks=_ranks(remote, folder), panels=self._panels(key, folder), place=str(folder.path)
        )

    def log(self, key: str, rank: int, tail: int) -> Sequence[str]:
        """Return the last lines of a rank in the last attempt."""
        folder, raw = self._folder(key), self._raw(key)
        job, each = RemoteJob(raw), ranks_per_pod(raw.get("spec"))
        index = rank // each
        name = pod_name(job.name, job.uid, Role.WORKER, index, job.status.attempt)
        ranks = range(index * each, index * each + each)
        pod = PodLog(name, "", Role.WORKER, index, job.status.attempt, ranks, started=True, ended=False)
        # A name of a pod holds the job's, which is what status.yaml says.
        if Path(name).name != name:
            raise UnknownJobError
        found = (line_of(pod, line, Pick(ranks=frozenset({rank}))) for line in _last_lines(folder.log(name)))
        return [line.content for line in found if line is not None][-tail:]

    def stacks(self, key: str, rank: int) -> str:
        """Return where a rank is that runs."""
        folder, raw = self._folder(key), self._raw(key)
        if RemoteJob(raw).finished:
            raise SourceError("the run has ended", 404)
        try:
            return stacks_of_run(folder, rank, ranks_per_pod(raw.get("spec")))
        except CommandError as error:
            raise SourceError(str(error), 404) from error

    def _stamps(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        with suppress(OSError), os.scandir(self._runs) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(OSError):
                        known = (self._runs / entry.name / STATUS_FILE).stat()
                        yield entry.name, (known.st_mtime_ns, known.st_size, known.st_ino)

    def _load(self, name: str, stamp: tuple[int, int, int]) -> RawJob:
        try:
            if stamp[1] > MAX_STATUS_BYTES:
                raise CommandError(f"{STATUS_FILE} is larger than {MAX_STATUS_BYTES} bytes")
            return RunFolder(self._runs / name).read_job()
        except (CommandError, UnicodeDecodeError):
            return {"metadata": {"name": name, "namespace": "", "uid": ""}, "status": {"phase": "Unreadable"}}

    def _folder(self, key: str) -> RunFolder:
        """The folder of a run. A key with a slash, or with dots alone, names none."""
        if not _NAME.fullmatch(key) or not (self._runs / key / STATUS_FILE).is_file():
            raise UnknownJobError
        return RunFolder(self._runs / key)

    def _raw(self, key: str) -> RawJob:
        try:
            known = (self._runs / key / STATUS_FILE).stat()
        except OSError as error:
            raise UnknownJobError from error
        stamp = known.st_mtime_ns, known.st_size, known.st_ino
        read = self._read.get(key)
        if read is None or read.stamp != stamp:
            read = self._read[key] = _Read(stamp, self._load(key, stamp))
        return read.raw

    def _job(self, key: str, raw: RawJob, locked: frozenset[int] | None) -> Job:
        job, folder = Job(key, raw), self._runs / key
        if RemoteJob(raw).finished or job.status.phase in (None, "Suspended", "Unreadable"):
            return job
        if locked is not None and _inode(folder) not in locked:
            return replace(job, phase=INTERRUPTED)
        now = LiveProgress.of(job.status).look(_scratches(folder))
        return replace(
            job, step=now.step, loss=now.loss, rate=now.samples_per_second, left_seconds=now.remaining_seconds
        )

    def _panels(self, key: str, folder: RunFolder) -> Sequence[dict[str, object]]:
        file = self._curves.setdefault(key, MetricsFile(folder.metrics / METRICS_FILE))
        self._curves.move_to_end(key)
        if len(self._curves) > _MAX_CURVES:
            self._curves.popitem(last=False)
        return file.panels()


def _sentences(job: RemoteJob, folder: RunFolder, phase: str | None, now: datetime) -> tuple[str, Sequence[str]]:
    """Return why the run is where it is, and what to do."""
    resume = f"`disttrain run --resume {folder.path}` resumes it"
    if phase == INTERRUPTED:
        return f"No `disttrain run` of this machine works on {job.name}: it was killed, or the machine restarted.", [
            resume
        ]
    if job.phase == "Unreadable":
        return f"{folder.status_file} cannot be read.", []
    if job.finished or job.holds(ConditionType.RUNNING) or job.holds(ConditionType.SUSPENDED):
        found = why(job, [], [], now)
        return found.paragraph, [resume] if job.holds(ConditionType.SUSPENDED) else found.todo
    # Processes of this machine are no pods that `why` could count.
    running = job.condition(ConditionType.RUNNING)
    reason = f" ({running.reason}): {running.message}" if running is not None else ""
    return f"{job.name} does not run yet{reason}.", []


def _ranks(job: RemoteJob, folder: RunFolder) -> dict[int, Rank]:
    """Return where the ranks are, by their reports; of a run that has ended, how they did."""
    spec, status = job.raw.get("spec"), job.status
    each, node = ranks_per_pod(spec), socket.gethostname()
    verdict = status.attempts[-1].verdict if status.attempts else None
    found = {}
    for rank in range(min(status.world_size or 0, MAX_RANKS)):
        pod = pod_name(job.name, job.uid, Role.WORKER, rank // each, status.attempt)
        report = _report(report_path(report_dir(folder.scratch(pod)), rank))
        if report is not None:
            state = "failed" if report.error is not None else "done" if report.done else "running"
            found[rank] = Rank(pod, node, state, report.step)
        elif job.holds(ConditionType.COMPLETE):
            found[rank] = Rank(pod, node, "done", status.progress.step if status.progress is not None else None)
        elif verdict is not None and (verdict.rank == rank or (verdict.rank is None and verdict.pod == pod)):
            found[rank] = Rank(pod, node, "failed")
        else:
            over = job.finished or job.holds(ConditionType.SUSPENDED)
            found[rank] = Rank(pod, node, "stopped" if over else "waiting")
    return found


def _report(path: Path) -> RankReport | None:
    try:
        with path.open("rb") as file:
            return RankReport.model_validate_json(file.read(_REPORT_BYTES))
    except (OSError, ValueError):
        return None


def _scratches(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted((folder / "pods").iterdir())
    return []


def _last_lines(path: Path) -> list[bytes]:
    """Return the lines of the end of a file, the first of them whole."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            lines = file.read(LOG_BYTES).splitlines()
    except OSError:
        return []
    return lines[1:] if size > LOG_BYTES else lines


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except OSError:
        return -1


def _locked_inodes() -> frozenset[int] | None:
    """Return the inodes on which somebody holds a lock of flock(2); None where the system does not say.

    Asking for the lock would take it for a moment, in which a `disttrain run` that begins would be refused.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        return frozenset(int(line.split()[5].rpartition(":")[2]) for line in lines if " FLOCK " in line)
    except (OSError, ValueError, IndexError):
        return None
