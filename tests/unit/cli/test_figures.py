"""Rows of figures, from the lines of a log on a cluster and from metrics.jsonl on this machine."""

import math
from pathlib import Path

import pytest

from disttrain import Client, CommandError, LocalClient
from disttrain.local.folder import METRICS_FILE, RunFolder
from disttrain.logs.figures import rows_of
from disttrain_trainer.metrics.report import _line
from tests.builders import a_job, a_raw_job, a_raw_pod, running
from tests.unit.cli.fake_api import TIME, FakeApi, a_condition

VALUES = {
    "step": 120, "loss_metrics/global_avg_loss": 0.0312, "grad_norm": 1.5, "throughput(sps)": 1234567.0,
    "throughput(tps)": 4200.0, "tflops": 1234.5, "mfu(%)": 41.25, "memory/max_reserved(GiB)": 12.5,
}  # fmt: skip
EVALUATION = "evaluation: 120  loss: 0.0500  accuracy: nan  mine/f1: -0.2500"


def test_a_line_of_the_trainer_is_a_row_by_the_names_of_metrics_jsonl() -> None:
    """Red where the trainer's line changes and this does not."""
    (row,) = rows_of([_line(VALUES)])
    memory = {"memory(GiB)": 12.5}
    assert row == {key: value for key, value in VALUES.items() if not key.startswith("memory/")} | memory
    few = {key: value for key, value in VALUES.items() if key not in ("throughput(tps)", "tflops", "mfu(%)")}
    (row,) = rows_of([_line(few | {"grad_norm": math.inf})])
    assert row["grad_norm"] is None
    assert rows_of([EVALUATION]) == [
        {
            "step": 120,
            "validation_metrics/global_avg_loss": 0.05,
            "validation_metrics/accuracy": None,
            "validation_metrics/mine/f1": -0.25,
        }
    ]


@pytest.mark.parametrize(
    "line",
    [
        "", "step", "step: 1", "step: x  loss: 1", "step: 1.5  loss: 1", "step: 1  loss: high", "a step: 1  loss: 1",
        "step: 1  loss: 1 and more", "steps: 1  loss: 1", "step: -1  loss: 1", f"step: {'9' * 5000}  loss: x",
    ],
)  # fmt: skip
def test_other_lines_are_passed_over(line: str) -> None:
    assert rows_of([line]) == []


def test_figures_of_a_cluster_are_read_from_the_log_of_rank_0(api: FakeApi) -> None:
    status = {"attempt": 1, "worldSize": 2, "phase": "Running", "conditions": [a_condition("Running")]}
    api.put_job(a_raw_job(status=status))
    for index in range(2):
        lines = [f"[rank {index}] {_line(VALUES | {'step': index + 1})}", f"[rank {index}] {EVALUATION}", "[agent] x"]
        api.put_pod(running(a_raw_pod(a_job(), index=index)), *(f"{TIME} {line}" for line in lines))
    rows = Client().metrics("digits")
    assert [row["step"] for row in rows] == [1, 120]
    raw = a_raw_job("own", status=status)
    raw["spec"] = {"workers": {"replicas": 1, "command": ["a"]}}
    api.put_job(raw)
    with pytest.raises(CommandError, match=r"own has a command of its own: its last figures are in `status.progress`"):
        Client().metrics("own")


def test_figures_of_this_machine_are_the_lines_of_metrics_jsonl(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "digits-ab1cd")
    folder.metrics.mkdir(parents=True)
    client = LocalClient(runs=tmp_path)
    assert client.metrics("digits") == []
    (folder.metrics / METRICS_FILE).write_text('{"step": 1, "grad_norm": null}\n{"step": 2}\n{"st')
    assert client.metrics("digits") == [{"step": 1, "grad_norm": None}, {"step": 2}]
