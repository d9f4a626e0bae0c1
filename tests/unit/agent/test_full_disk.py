"""A pod whose disk is full: its termination message is kept, or its exit code says it."""

import contextlib
from pathlib import Path

from disttrain_agent.environment import report_dir
from disttrain_agent.reports import Reports, TerminationMessage
from disttrain_api.names import Env, ExitCode
from disttrain_api.report import RankError, RankFailure, RankReport, decode_pod_report
from disttrain_trainer.metrics.report import Reporter
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
                assert report.progress.step == step


def test_first_words_are_written_on_a_disk_that_has_filled_up_meanwhile(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "64k") as folder:
        words = TerminationMessage(folder / "termination-log")
        # The kubelet takes the log of a pod that has left no words.
        assert (folder / "termination-log").read_bytes() == b""
        fill(folder)
        failure = RankFailure(rank=0, exit_code=1, message="m" * 1500, log_tail="l" * 4000)
        words.write(None, failure)
        report = decode_pod_report((folder / "termination-log").read_text())
    assert report.failure.message == "m" * 1500


def test_a_rank_says_why_it_ends_on_a_disk_that_has_filled_up_meanwhile(tmp_path: Path) -> None:
    error = RankError(exit_code=1, reason="RankFailed", message="m" * 2000)
    with small_disk(tmp_path / "small", "64k") as folder:
        reports = Reports(report_dir(folder), [0, 1])
        reports.prepare()
        assert reports.progress() is None
        fill(folder)
        for rank in (0, 1):
            Reporter(rank, report_dir(folder)).fail(error)
            found = reports.of(rank)
            assert found.error == error


def test_ranks_that_find_no_room_for_their_reports_are_not_started(pod: Pod) -> None:
    with small_disk(pod.folder / "small", "16k", files=0) as scratch:
        pod.changes[Env.SCRATCH] = str(scratch / "scratch")
        pod.start("raise SystemExit('started')")
        assert pod.wait() == ExitCode.DISK_FULL
    failure = pod.failure
    assert (failure.exit_code, failure.reason) == (ExitCode.DISK_FULL, "DiskFull")
    assert failure.message == f"cannot start the ranks: No space left on device {scratch}/scratch"
