import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import GENEROUS
from tools.cluster.api import wait_for
from tools.cluster.paths import REPOSITORY
from tools.cluster.processes import MARK, OWNER, Daemon, ProcessId, marked, parse_marks, parse_stat

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def daemon(tmp_path: Path):
    made = Daemon("sleeper", SLEEPER, tmp_path)
    yield made
    made.kill()


def test_state_and_start_time_are_found_behind_a_name_with_spaces_and_parentheses():
    stat = "42 (a) (strange) name) S 1 42 42 0 -1 4194560 1 0 0 0 1 2 0 0 20 0 1 0 98765 1 2 3"
    assert parse_stat(stat) == ("S", 98765)


def test_a_started_daemon_runs_and_a_stopped_one_does_not(daemon: Daemon):
    daemon.start()
    assert daemon.running()
    daemon.stop()
    assert not daemon.running()
    assert not daemon.pid_file.exists()


def test_starting_twice_keeps_the_first(daemon: Daemon):
    daemon.start()
    first = daemon.running()
    daemon.start()
    assert daemon.running() == first


def test_a_pid_that_now_is_another_process_is_left_alone(daemon: Daemon):
    with subprocess.Popen(SLEEPER) as stranger:
        daemon.pid_file.write_text(f'{{"pid": {stranger.pid}, "start_time": 1}}')
        assert daemon.running() is None
        daemon.kill()
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"pid": 1'])
def test_a_broken_pid_file_means_that_nothing_runs(daemon: Daemon, content: str):
    daemon.pid_file.write_text(content)
    assert daemon.running() is None


def test_a_killed_daemon_leaves_no_zombie(daemon: Daemon):
    daemon.start()
    process = daemon.running()
    assert process
    daemon.kill()
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_daemon_that_ended_has_its_last_output_reported(tmp_path: Path):
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    short = Daemon("short", [sys.executable, "-c", f"{wait}print('no room')"], tmp_path)
    short.start()
    go.touch()
    wait_for(lambda: not short.running(), GENEROUS, lambda: "it does not end")
    assert short.end_message() == f"short ended: no room (log: {short.log})"


def test_a_daemon_is_found_by_its_mark_even_without_its_pid_file(daemon: Daemon, tmp_path: Path):
    daemon.start()
    process = daemon.running()
    assert process
    daemon.pid_file.unlink()
    # Right after its start the kernel may not show a process' environment yet.
    wait_for(lambda: [found.process for found in marked(tmp_path)] == [process], GENEROUS, lambda: "it is not found")
    process.end(grace=0)


def test_marks_name_the_folder_and_the_owner():
    environment = f"HOME=/root\0{MARK}=/state\0{OWNER}=12:34\0EMPTY\0".encode()
    assert parse_marks(environment) == ("/state", ProcessId(12, 34))
    assert parse_marks(b"HOME=/root\0") == (None, None)


def test_an_owner_is_distinguished_from_a_later_process_of_the_same_pid():
    now = ProcessId.of(os.getpid())
    assert now
    assert now.alive()
    assert not ProcessId(now.pid, now.start_time - 1).alive()


def test_a_daemon_ends_with_an_owner_that_is_killed(tmp_path: Path):
    program = (
        "import os, pathlib, signal, sys; from tools.cluster.processes import Daemon, ProcessId\n"
        f"daemon = Daemon('sleeper', {SLEEPER!r}, pathlib.Path(sys.argv[1]), owner=ProcessId.of(os.getpid()))\n"
        "daemon.start(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, check=False)
    assert done.returncode == -9
    daemon = Daemon("sleeper", SLEEPER, tmp_path)
    assert daemon.pid_file.exists()
    wait_for(lambda: not daemon.running(), GENEROUS, lambda: "it still runs")
