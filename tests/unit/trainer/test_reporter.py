"""What a rank's report file says as it goes on, and the stacks of all its threads when it is asked for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from disttrain_api.names import STACKS_SIGNAL
from disttrain_api.report import RankPhase
from disttrain_trainer.metrics.report import Reporter
from tests.waiting import GENEROUS, until

THREADS = """
import sys, threading
from pathlib import Path
from disttrain_agent.stacks import answer_for_stacks

def beside(began, ended):
    began.set()
    ended.wait()

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
            until(lambda: " in beside" in file.read_text() and " in <module>" in file.read_text())
        finally:
            process.communicate(timeout=GENEROUS)
    assert process.returncode == 0
