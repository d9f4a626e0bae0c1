import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import GENEROUS
from tools.cluster.api import wait_for
from tools.cluster.paths import REPOSITORY
from tools.cluster.processes import Daemon, marked

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def daemon(tmp_path: Path):
    made = Daemon("sleeper", SLEEPER, tmp_path)
    yield made
    made.kill()


def test_a_started_daemon_runs_and_a_stopped_one_does_not(daemon: Daemon):
    daemon.start()
    assert daemon.running()
    daemon.stop()
    assert not daemon.running()
    assert not daemon.pid_file.exists()


def test_a_pid_that_now_is_another_process_is_left_alone(daemon: Daemon):
    with subprocess.Popen(SLEEPER) as stranger:
        daemon.pid_file.write_text(f'{{"pid": {stranger.pid}, "start_time": 1}}')
        assert daemon.running() is None
        daemon.kill()
        assert stranger.poll() is None
        stranger.kill()


def test_a_daemon_is_found_by_its_mark_even_without_its_pid_file(daemon: Daemon, tmp_path: Path):
    daemon.start()
    process = daemon.running()
    assert process
    daemon.pid_file.unlink()
    # Right after its start the kernel may not show a process' environment yet.
    wait_for(lambda: [found.process for found in marked(tmp_path)] == [process], GENEROUS, lambda: "it is not found")
    process.end(grace=0)


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
