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
