"""What a rank's report file says as it goes on, and the stacks of all its threads when it is asked for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from disttrain_agent.collectives import ask_for_collectives, other_threads
from disttrain_api.names import STACKS_SIGNAL
from disttrain_api.report import RankPhase
from disttrain_trainer.metrics.report import Reporter
from tests.waiting import GENEROUS, until

THREADS = """
import json, sys, threading
from pathlib import Path
from disttrain_agent.stacks import answer_for_stacks

def beside(began, ended):
    began.set()
    ended.wait()

def deep(calls):
    return 0 if calls == 0 else 1 + deep(calls - 1)

def busy():
    while True:
        deep(20), json.dumps([{"a": [1, 2, 3]}])

for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
began, ended = threading.Event(), threading.Event()
thread = threading.Thread(target=beside, args=(began, ended))
thread.start()
began.wait()
answer_for_stacks(3, Path(sys.argv[1]))
sys.stdin.read()
ended.set()
"""


def test_the_phase_is_training_from_the_first_step_on_but_during_others(tmp_path: Path) -> None:
    def phase() -> str:
        found: str = json.loads((tmp_path / "rank-2.json").read_text())["phase"]
        return found

    reporter = Reporter(2, tmp_path)
    assert reporter.step is None
    reporter.follow(lambda: 7)
    assert (phase(), reporter.step) == (RankPhase.TRAINING, 7)
    with reporter.during(RankPhase.SAVING):
        assert phase() == RankPhase.SAVING
    assert phase() == RankPhase.TRAINING


def test_the_stacks_are_those_of_all_threads(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", THREADS, str(tmp_path)]
    file = tmp_path / "rank-3.stacks"
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        try:
            until(file.exists)
            os.kill(process.pid, STACKS_SIGNAL)
            until(lambda: " in <module>" in file.read_text())
            until(lambda: ask_for_collectives(3, tmp_path))
            until(lambda: " in beside" in other_threads(3, tmp_path))
            assert other_threads(3, tmp_path).startswith("Thread 0x")
            # Red where the signal's answer is of all threads: those that run would end the process after some fifty.
            for _ in range(300):
                size = file.stat().st_size
                os.kill(process.pid, STACKS_SIGNAL)
                until(lambda size=size: file.stat().st_size > size or process.poll() is not None)
                assert process.poll() is None
        finally:
            process.communicate(timeout=GENEROUS)
    assert process.returncode == 0
