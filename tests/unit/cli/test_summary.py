"""How a run ends, for people and for shells."""

from pathlib import Path
from typing import Any

import pytest

from disttrain.local.folder import RunFolder
from disttrain.local.summary import exit_code, summary
from disttrain_api.status import JobStatus
from tests.builders import NOW
from tests.unit.cli.fake_api import a_condition

POD = "digits-3f9a1-worker-0-a1"


def a_status(condition: str, verdict: dict[str, Any] | None = None, **fields: Any) -> JobStatus:
    entry = a_condition(condition, reason="DataNotFound", message="rank 1 exited with code 81: no file")
    attempts = [{"number": 1, "startTime": NOW.isoformat(), "verdict": verdict}] if verdict else []
    return JobStatus.model_validate({"conditions": [entry], "attempts": attempts, **fields})


def a_verdict(code: int, **fields: Any) -> dict[str, Any]:
    return {"reason": "x", "message": "y", "exitCode": code, "pod": POD, "rank": 1, **fields}


@pytest.mark.parametrize(
    ("status", "interrupted_by", "code"),
    [
        (a_status("Complete"), None, 0),
        (a_status("Complete"), 2, 0),
        (a_status("Suspended"), None, 0),
        (a_status("Suspended"), 2, 130),
        (a_status("Suspended"), 15, 143),
        (a_status("Failed"), None, 1),
        (a_status("Failed", a_verdict(81)), None, 81),
        (a_status("Failed", a_verdict(3)), None, 1),
        (a_status("Failed", a_verdict(81, rank=None)), None, 1),
    ],
    ids=[
        "complete",
        "complete although interrupted",
        "suspended by the manifest",
        "suspended by SIGINT",
        "suspended by SIGTERM",
        "failed",
        "failed for good",
        "failed again and again",
        "failed with another program's 81",
    ],
)
def test_the_exit_code_says_how_it_ended(status: JobStatus, interrupted_by: int | None, code: int) -> None:
    assert exit_code(status, interrupted_by=interrupted_by) == code


def test_success_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    progress = {
        "step": 150,
        "totalSteps": 150,
        "loss": 0.0512,
        "samplesPerSecond": 5120.4,
        "metrics": [{"name": "accuracy", "value": 0.98}, {"name": "loss", "value": 0.07}],
        "updateTime": NOW.isoformat(),
    }
    folder = RunFolder(Path("disttrain-runs/digits-3f9a1"))
    line = summary(a_status("Complete", progress=progress, restarts=1), folder, storage=folder.path / "storage")
    assert line == (
        "Succeeded · 1 restart · accuracy 0.98 · held-out loss 0.07 · 150 steps · loss 0.0512 · 5,120 samples/s · "
        "logs disttrain-runs/digits-3f9a1/logs · checkpoints disttrain-runs/digits-3f9a1/storage"
    )


@pytest.mark.parametrize(("each", "text"), [([1], "1 restart in place"), ([2, 1], "3 restarts in place")])
def test_restarts_in_place_are_counted_apart(tmp_path: Path, each: list[int], text: str) -> None:
    attempts = [
        {"number": number, "startTime": NOW.isoformat(), "restartsInPlace": count} for number, count in enumerate(each)
    ]
    status = a_status("Complete").model_copy(
        update={"attempts": JobStatus.model_validate({"attempts": attempts}).attempts}
    )
    assert f"Succeeded · {text} · " in summary(status, RunFolder(tmp_path), storage=None)


GOODPUT = {
    "since": "2026-01-01T12:00:00Z",
    "updateTime": "2026-01-01T12:16:40Z",
    "spent": [{"state": "Starting", "seconds": 380}, {"state": "Training", "seconds": 620}],
    "percent": 62,
}


def test_either_end_says_where_the_time_went(tmp_path: Path) -> None:
    folder, text = RunFolder(tmp_path), "goodput 62% of 16m (training 10m, starting 6m)"
    times = {"goodput": GOODPUT, "completionTime": "2026-01-01T12:16:40Z"}
    assert summary(a_status("Complete", **times), folder, storage=None).endswith(f" · {text}")
    assert f"  {text}" in summary(a_status("Failed", **times), folder, storage=None).splitlines()


def test_success_without_the_last_evaluation_says_so(tmp_path: Path) -> None:
    failure = "the evaluation after step 150 failed on rank 1: ValueError: no"
    progress = {"step": 150, "totalSteps": 150, "evaluationFailure": failure, "updateTime": NOW.isoformat()}
    line = summary(a_status("Complete", progress=progress), RunFolder(tmp_path), storage=None)
    assert line.startswith(f"Succeeded · {failure} · 150 steps · ")


@pytest.mark.parametrize("letter", ["x", "\x1b", "ü"], ids=["plain", "escaped", "two bytes"])
def test_a_line_of_a_log_is_shown_within_bounds(tmp_path: Path, letter: str) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    folder.log(POD).write_text(f"[rank 1] short\n[rank 1] long {letter * 20_000}\n")
    lines = summary(a_status("Failed", a_verdict(81)), folder, storage=None).splitlines()
    assert "    [rank 1] short" in lines
    (long,) = (line for line in lines if line.startswith("    [rank 1] long "))
    assert long.endswith("…")
    assert max(len(line.encode()) for line in lines) < 1100


def test_failure_is_a_block_with_lines_of_the_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("run"))
    folder.logs.mkdir(parents=True)
    folder.log(POD).write_text("[rank 0] fine\n[rank 1] no file\n[agent] exit code 81\n")
    assert summary(a_status("Failed", a_verdict(81)), folder, storage=None).splitlines() == [
        "Failed: DataNotFound",
        "  rank 1 exited with code 81: no file",
        "  last lines of its log:",
        "    [rank 1] no file",
        "  what to do: Make the data available to every pod (a volume, or the image), or correct the path",
        f"  log: run/logs/{POD}.log",
    ]
