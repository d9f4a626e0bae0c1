"""A rank whose disk is full: its report stays readable, and what cannot be written is one sentence."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_agent.environment import report_dir
from disttrain_agent.reports import Reports
from disttrain_api.names import ExitCode
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.metrics.tensorboard import open_events
from disttrain_trainer.runtime.errors import describe
from tests.small_disk import fill, small_disk
from tests.waiting import GENEROUS


def test_a_report_is_rewritten_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "scratch", "64k") as scratch:
        folder = report_dir(scratch)
        reporter = Reporter(0, folder)
        reporter.update(step=1, loss=0.123456789)
        fill(scratch)
        for changes in ({"step": 20, "loss": 0.5}, {"step": 12345, "loss": 1 / 3}, {"done": True}):
            reporter.update(**changes)
            found = Reports(folder, [0]).of(0)
            assert found is not None
            assert found.model_copy(update={"step_time": None}) == reporter.report, (
                "it has the time of its reading alone"
            )
        assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-0.steps"]


def test_a_first_report_that_finds_no_room_names_its_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "scratch", "64k") as scratch:
        folder = report_dir(scratch)
        folder.mkdir()
        fill(scratch)
        with pytest.raises(OSError, match=r"rank-3\.json") as full:
            Reporter(3, folder).update(step=1)
    described = describe(full.value)
    assert (described.exit_code, described.reason) == (ExitCode.DISK_FULL, "DiskFull")
    assert described.message == f"cannot write {folder}/rank-3.json: No space left on device; make room on its disk"
    assert described.signature is None, "it may come again or not: files of others are in the way"


def test_a_full_disk_is_found_behind_the_error_that_it_caused() -> None:
    error = RuntimeError("the cache is broken")
    assert describe(error).exit_code == 1
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded", "/home/me/cache")
    assert describe(error).message == "cannot write /home/me/cache: Disk quota exceeded; make room on its disk"


# No thread ends with a traceback.
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_event_files_that_find_no_room_end_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    with small_disk(tmp_path / "metrics", "64k") as folder:
        fill(folder)
        events = open_events(True, folder)
        for step in range(1, 100):
            events.write({"step": step, "loss": 0.5})
    assert capsys.readouterr().err == "disttrain: no more event files for TensorBoard: No space left on device\n"


STOP_REQUESTED = """
import os, signal, threading
from disttrain_trainer.runtime.stop import StopRequest

def no_room(message):
    raise OSError(28, "No space left on device")

stop = StopRequest.on_sigterm()
stop.before_exit = no_room
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait()
"""


def test_sigterm_ends_a_rank_that_can_write_neither_report_nor_log() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", STOP_REQUESTED], stderr=full, timeout=GENEROUS, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
