"""`disttrain.report`: what it refuses, what it writes, and what it costs."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import disttrain
from disttrain_api.report import RankReport, decode_pod_report
from disttrain_session.place import Place, place_of
from disttrain_session.reported_values import checked
from disttrain_session.reporting import Reporter


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What the operator sets on a pod of a job with a command of its own."""
    return {
        "DISTTRAIN_JOB_UID": "uid-1",
        "DISTTRAIN_ROLE": "worker",
        "DISTTRAIN_SCRATCH": str(folder),
        "DISTTRAIN_TERMINATION_LOG": str(folder / "termination-log"),
        "DISTTRAIN_METRICS_DIR": str(folder / "metrics"),
        "DISTTRAIN_ATTEMPT": "2",
        "NODE_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        **more,
    }


def place(folder: Path, **more: str) -> Place:
    found = place_of(environment(folder, **more))
    assert found is not None
    return found


def take(reporter: Reporter, step: Any, total: Any = 10, loss: Any = None, rate: Any = None, **figures: Any) -> None:
    reporter.take(checked(step, total, loss, rate, figures))


def written(folder: Path, rank: int) -> RankReport:
    return RankReport.model_validate_json((folder / "reports" / f"rank-{rank}.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"step": 1.0}, "step is 1.0 (float), expected a whole number"),
        ({"step": True}, "step is True (bool)"),
        ({"step": -1}, "step is -1, expected 0 to"),
        ({"step": 11}, "step is 11, expected 0 to total, which is 10"),
        ({"total": 0}, "total is 0, expected 1 to"),
        ({"total": None}, "total is None"),
        ({"loss": "0.1"}, "loss is '0.1' (str), expected a number"),
        ({"loss": torch.ones(2)}, "loss is a Tensor of shape (2,), expected one number"),
        ({"samples_per_second": [1]}, "samples_per_second is [1] (list)"),
        ({"accuracy": None}, "accuracy is None"),
        ({"accuracy": 1j}, "accuracy is 1j"),
        ({"accuracy": torch.ones((), dtype=torch.complex64)}, "accuracy is complex"),
        ({f"figure_{number}": number for number in range(65)}, "65 figures besides loss, expected at most 64"),
        ({"a" * 129: 1}, "has 129 characters, expected at most 128"),
    ],
)
def test_an_argument_that_is_none_is_named_also_outside_a_job(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as refused:
        disttrain.report(**{"step": 1, "total": 10, **arguments})
    assert named in str(refused.value)


def test_numbers_of_any_kind_are_figures(tmp_path: Path) -> None:
    reporter = Reporter(place(tmp_path, RANK="2", LOCAL_RANK="0"), clock=lambda: 0.0)
    loss = torch.tensor([0.5], requires_grad=True)
    take(reporter, np.int64(1), 10, loss, Fraction(1, 4), reward=np.float32(2), lost=float("nan"), far=float("inf"))
    report = written(tmp_path, 2)
    assert (report.step, report.total_steps, report.loss, report.samples_per_second) == (1, 10, 0.5, 0.25)
    assert report.metrics == {"reward": 2.0}, "JSON knows neither inf nor nan"


def test_writes_are_as_many_as_seconds_and_the_last_step_is_always_written(tmp_path: Path) -> None:
    now = 0.0
    reporter = Reporter(place(tmp_path, RANK="0", LOCAL_RANK="0", NODE_RANK="0"), clock=lambda: now)
    steps, remaining = [], []
    for step in range(1, 11):
        take(reporter, step, loss=1 / step)
        steps.append(written(tmp_path, 0).step)
        remaining.append(written(tmp_path, 0).remaining_seconds)
        now += 0.3
    assert steps == [1, 1, 1, 1, 5, 5, 5, 5, 9, 10]
    assert remaining[:4] == [None] * 4, "one step has no pace"
    assert remaining[4:] == pytest.approx([1.5] * 4 + [0.3, 0.0])
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["step"]) for line in lines] == [(2, 1), (2, 5), (2, 9), (2, 10)]
    assert lines[1]["loss_metrics/global_avg_loss"] == 0.2


def test_the_termination_message_is_left_to_the_log_until_the_work_is_done(tmp_path: Path) -> None:
    reporter = Reporter(place(tmp_path, RANK="2", LOCAL_RANK="0"))
    message = tmp_path / "termination-log"
    take(reporter, 9)
    assert not message.exists() or message.read_text() == ""
    take(reporter, 10, reward=3)
    report = decode_pod_report(message.read_text())
    assert report.failure is None
    assert report.progress == RankReport(
        rank=2, step=10, total_steps=10, remaining_seconds=0.0, metrics={"reward": 3.0}
    )


def test_of_a_pod_the_lowest_rank_that_reports_speaks(tmp_path: Path) -> None:
    lower, higher = (Reporter(place(tmp_path, RANK=rank, LOCAL_RANK=local)) for rank, local in (("2", "0"), ("3", "1")))
    message = tmp_path / "termination-log"
    take(higher, 10, 10, 3.0)
    alone = decode_pod_report(message.read_text())
    take(lower, 10, 10, 2.0)
    take(higher, 10, 10, 4.0)
    both = decode_pod_report(message.read_text())
    assert alone is not None
    assert both is not None
    assert [found.progress.rank for found in (alone, both) if found.progress] == [3, 2]


def test_files_that_cannot_be_written_are_passed_over(tmp_path: Path) -> None:
    for name in ("reports", "metrics"):
        (tmp_path / name).write_text("no folder")
    (tmp_path / "termination-log").mkdir()
    reporter = Reporter(place(tmp_path, RANK="0", LOCAL_RANK="0", NODE_RANK="0"))
    take(reporter, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"reports", "metrics", "termination-log"}
    # As well after the folder has gone.
    (tmp_path / "reports").unlink()
    take(reporter, 10)
    assert written(tmp_path, 0).step == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"DISTTRAIN_JOB_UID": ""},
        {"DISTTRAIN_SCRATCH": ""},
        {"DISTTRAIN_CONFIG": "/etc/disttrain/job.json"},
        {"DISTTRAIN_ROLE": "ps"},
    ],
)
def test_nothing_is_written_outside_a_job_and_by_servers(tmp_path: Path, changes: dict[str, str]) -> None:
    assert place_of(environment(tmp_path, **changes)) is None


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({"RANK": "3", "LOCAL_RANK": "1"}, (3, 1)), ({}, (2, 0)), ({"RANK": "three", "LOCAL_RANK": "-1"}, (2, 0))],
)
def test_without_a_rank_it_is_the_first(tmp_path: Path, variables: dict[str, str], rank: tuple[int, int]) -> None:
    found = place(tmp_path, **variables)
    assert (found.rank, found.local_rank) == rank


def test_the_figures_of_a_program_that_leaves_between_two_writes_are_written(tmp_path: Path) -> None:
    program = (
        "import sys, disttrain\n"
        "for step in range(1, 5): disttrain.report(step=step, total=10)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**_paths(), **environment(tmp_path)}, check=False)
    assert done.returncode == 0
    assert written(tmp_path, 2).step == 4


def test_disttrain_exports_its_names_and_loads_them_when_they_are_used() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "import disttrain\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "assert loaded == {'disttrain'}, loaded\n"
        "assert disttrain.__all__ == sorted(disttrain.__all__)\n"
        "assert callable(disttrain.report)\n"
        "assert not hasattr(disttrain, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", program], env=_paths(), check=True)


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
