"""A pod whose disk is full: its last words are kept, or its exit code says it."""

import contextlib
from pathlib import Path

from disttrain_api.names import Env, ExitCode
from disttrain_api.report import RankReport, decode_pod_report
from disttrain_trainer.agent.reports import TerminationMessage
from tests.small_disk import fill, small_disk

from .conftest import Pod


def test_last_words_are_rewritten_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "16k") as folder:
        words = TerminationMessage(folder / "termination-log")
        words.write(RankReport(rank=0, step=123456789))
        filler = fill(folder)
        # Who else writes there takes a block as soon as one is free.
        with filler.open("ab", buffering=0) as greedy:
            for step in (2, 987654321, 3):
                words.write(RankReport(rank=0, step=step))
                with contextlib.suppress(OSError):
                    greedy.write(b"x" * 4096)
                report = decode_pod_report((folder / "termination-log").read_text())
                assert report is not None
                assert report.progress is not None
                assert report.progress.step == step


def test_ranks_that_find_no_room_for_their_reports_are_not_started(pod: Pod) -> None:
    with small_disk(pod.folder / "small", "16k", files=0) as scratch:
        pod.changes[Env.SCRATCH] = str(scratch / "scratch")
        pod.start("raise SystemExit('started')")
        assert pod.wait() == ExitCode.DISK_FULL
    failure = pod.report.failure
    assert failure is not None
    assert (failure.exit_code, failure.reason) == (ExitCode.DISK_FULL, "DiskFull")
    assert failure.message == f"cannot start the ranks: No space left on device {scratch}/scratch"
