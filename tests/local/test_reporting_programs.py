"""Programs of one's own that report by `disttrain.report`: a local run shows what they report."""

import json

import pytest

from .conftest import Workplace, own, script

REPORTING = """
import disttrain

for step in range(1, 31):
    disttrain.report(step=step, total=30, loss=1 / step, reward=step * 2)
"""


def test_progress_figures_and_plots_of_a_program_that_reports(workplace: Workplace) -> None:
    run = workplace.run(own(workplace, "python", script(workplace, REPORTING), replicas=2))
    assert run.exit_code == 0, run.stderr
    progress = run.status["progress"]
    assert (progress["step"], progress["totalSteps"]) == (30, 30)
    assert progress["loss"] == pytest.approx(1 / 30)
    assert progress["metrics"] == [{"name": "reward", "value": 60.0}]
    assert "Succeeded · reward 60 · 30 steps · loss 0.03333" in run.stderr
    lines = [json.loads(line) for line in (run.home / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {
        "attempt": 1, "step": 30, "loss_metrics/global_avg_loss": pytest.approx(1 / 30), "reward": 60.0,
    }  # fmt: skip
    assert (run.home / "metrics" / "loss.png").exists()


UNMODIFIED = """
import os, sys, time

rank = int(os.environ["RANK"])
for step in range(0, 101, 10):
    if rank == 0:
        print(f"iter {step}: loss {4 - step / 50:.4f}, time 250.00ms, mfu 12.00%")
        print(f"\\r {step}%|#  | {step}/100 [00:01<00:09]", end="", file=sys.stderr)
"""


def test_progress_of_a_torchrun_script_that_reports_nothing_is_read_from_its_lines(workplace: Workplace) -> None:
    pattern = r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<ms>\S+)ms"
    path = workplace.write(
        "own",
        training=None,
        workers={"processesPerPod": 2, "command": ["torchrun", script(workplace, UNMODIFIED)]},
        progress={"totalSteps": 100, "logRules": [{"pattern": pattern}]},
    )
    run = workplace.run(path)
    assert run.exit_code == 0, run.stderr
    progress = run.status["progress"]
    assert (progress["step"], progress["totalSteps"], progress["loss"]) == (100, 100, 2.0)
    assert progress["metrics"] == [{"name": "ms", "value": 250.0}]
    assert "Succeeded · ms 250 · 100 steps · loss 2" in run.stderr
    lines = [json.loads(line) for line in (run.home / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"attempt": 1, "step": 100, "loss_metrics/global_avg_loss": 2.0, "ms": 250.0}
    log = run.log(0, 1)
    assert "iter 100: loss 2.0000, time 250.00ms, mfu 12.00%\n" in log, "the log is the script's own"
