"""What the ranks report, and the pod's termination message made of it."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from disttrain_api.report import PodReport, RankFailure, RankReport, encode_pod_report
from disttrain_trainer.agent.environment import meeting_file


class Reports:
    """The report files of this pod's ranks, read again only where they changed."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._ranks = folder, tuple(ranks)
        self._read: dict[int, tuple[tuple[int, int], RankReport]] = {}

    def prepare(self) -> None:
        """Make the folder; what a former life has left in it says nothing about this one. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        meeting_file(self._folder).unlink(missing_ok=True)
        for rank in self._ranks:
            report_path(self._folder, rank).unlink(missing_ok=True)

    def of(self, rank: int) -> RankReport | None:
        """The latest report of a rank, None before its first."""
        path = report_path(self._folder, rank)
        # Half a report cannot be seen, ranks rename; one of another version of the trainer is as good as none.
        with contextlib.suppress(OSError, ValueError):
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
            if self._read.get(rank, (None, None))[0] != version:
                self._read[rank] = (version, RankReport.model_validate_json(path.read_bytes()))
        return self._read[rank][1] if rank in self._read else None

    def progress(self) -> RankReport | None:
        """The report of the lowest rank that has one."""
        return next((report for rank in self._ranks if (report := self.of(rank)) is not None), None)


class TerminationMessage:
    """The pod's last words, kept up to date while it lives: a container that is killed cannot write any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: str | None = None

    def write(self, progress: RankReport | None, failure: RankFailure | None = None) -> None:
        """Write them if they changed. Without a place for them the pod still works."""
        if progress is None and failure is None:
            return
        text = encode_pod_report(PodReport(progress=progress, failure=failure))
        if text == self._written:
            return
        # In place: the file is a bind mount of the kubelet's and cannot be renamed over. It is cut off last: on a full
        # disk its blocks are all there is.
        with contextlib.suppress(OSError), open(self._path, "r+b", opener=_opener) as file:
            file.write(text.encode())
            file.truncate()
            self._written = text


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def report_path(folder: Path, rank: int) -> Path:
    """The file in which a rank keeps its report."""
    return folder / f"rank-{rank}.json"
