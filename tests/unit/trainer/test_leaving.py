"""A process that leaves does what Python does at an end, but not for ever."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import GENEROUS

BEGIN = """
import atexit, gc, gzip, io, os, sys, threading, time
from disttrain_trainer.runtime.leaving import leave
gc.freeze()
"""


def leave(folder: Path, program: str, code: int = 3, seconds: float = GENEROUS) -> subprocess.CompletedProcess[str]:
    source = f"{BEGIN}{program}\nleave({code}, {seconds})"
    return subprocess.run(
        [sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, timeout=2 * GENEROUS, check=False
    )


@pytest.mark.parametrize("code", [0, 83])
def test_files_are_whole(tmp_path: Path, code: int) -> None:
    ended = leave(
        tmp_path,
        """
text = open("text", "w"); text.write("a line")
data = open("data", "wb"); data.write(b"bytes")
packed = gzip.open("packed", "wt"); packed.write("packed")
""",
        code,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert (tmp_path / "text").read_text() == "a line"
    assert (tmp_path / "data").read_bytes() == b"bytes"
    with gzip.open(tmp_path / "packed", "rt") as packed:
        assert packed.read() == "packed"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    ended = leave(tmp_path, """full = open("/dev/full", "w"); full.write("a line"); print("said")""")
    assert (ended.returncode, ended.stdout) == (3, "said\n")
    assert ended.stderr == "disttrain: '/dev/full' is not whole: No space left on device\n"


def test_files_of_a_parent_are_left_to_it(tmp_path: Path) -> None:
    ended = leave(
        tmp_path,
        """
file = open("file", "w"); file.write("once")
if os.fork() == 0:
    gc.freeze()
    leave(0)
os.wait()
""",
    )
    assert ended.returncode == 3
    assert (tmp_path / "file").read_text() == "once"


def test_threads_end_before_exit_handlers_run_in_reverse_order(tmp_path: Path) -> None:
    ended = leave(
        tmp_path,
        """
go = threading.Event()
atexit.register(print, "registered first")
atexit.register(print, "registered last")
threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Thread(target=go.set).start()
""",
    )
    assert ended.returncode == 3
    assert ended.stdout.splitlines() == ["thread", "registered last", "registered first"]


def test_what_an_exit_handler_raises_is_printed_and_others_run(tmp_path: Path) -> None:
    ended = leave(
        tmp_path,
        """
def broken(): raise ValueError("the logger's own mistake")
atexit.register(print, "the other")
atexit.register(broken)
""",
    )
    assert (ended.returncode, ended.stdout) == (3, "the other\n")
    assert "ValueError: the logger's own mistake" in ended.stderr


@pytest.mark.parametrize(
    "program",
    ["atexit.register(threading.Event().wait)", "threading.Thread(target=threading.Event().wait).start()"],
    ids=["an exit handler", "a thread"],
)
def test_what_does_not_end_is_left_in_the_end(tmp_path: Path, program: str) -> None:
    ended = leave(tmp_path, program, seconds=0.1)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == "disttrain: threads, exit handlers or files did not end within 0.1 s\n"


def test_a_signal_during_an_end_changes_neither_code_nor_report(tmp_path: Path) -> None:
    ended = leave(
        tmp_path,
        """
import signal
from disttrain_trainer.runtime.stop import StopRequest
stop = StopRequest.on_sigterm()
stop.before_exit = lambda message: print("reported", message)
stop.work_ended(5)
atexit.register(threading.Event().wait)
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
""",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "", "")


def test_a_rank_of_a_local_run_ends_as_a_program_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(
        """
import atexit, sys
file = open("file", "w"); file.write("a line")
atexit.register(print, "exit handler")
sys.exit("the user's sentence")
"""
    )
    ended = leave(
        tmp_path,
        """
from disttrain.local.fork_server import fork_rank
rank = fork_rank([sys.executable, "-P", "-m", "users"], {**os.environ, "RANK": "0"})
print(rank.stdout.readall().decode(), os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1]))
""",
    )
    assert ended.returncode == 3, ended.stderr
    # The log's pipe has both streams.
    assert set(ended.stdout.splitlines()) == {"exit handler", "the user's sentence", " 1"}
    assert (tmp_path / "file").read_text() == "a line"
