"""Callbacks: called on every rank between steps, with a state that goes on exactly, and refused by name where wrong."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_api.training import Training
from disttrain_trainer.callbacks import build_callbacks
from disttrain_trainer.runtime.errors import CallbackFailed, InvalidConfiguration, describe
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.test_tasks import with_task
from tests.unit.trainer.worlds import job, run_cases, run_ranks, small

CODE = "tests.unit.trainer.callback_code"
REGULAR = {"evaluation": {"interval": 3}, "checkpoint": {"interval": 3}, "logging": {"interval": 2}}
CUT = {SHARD: 2}
LOCAL = {"dataParallel": {"mode": "LocalSGD"}}
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "fsdp2": CUT, "local sgd": LOCAL}
CALLS = [
    ["start", 0],
    *(["step", step] for step in (1, 2, 3)),
    *(["checkpoint", 3], ["evaluation", 3]),
    *(["step", step] for step in (4, 5, 6)),
    *(["checkpoint", 6], ["evaluation", 6], ["end", 6]),
]
LOGGED = {"step", "lr", "grad_norm", "loss_metrics/global_avg_loss"}


def recorded(folder: Path, **changes: Any) -> dict[str, Any]:
    """A training whose callback writes to a folder."""
    return small(
        callbacks=[{"entrypoint": f"{CODE}:Recorder", "config": {"folder": str(folder)}}], **REGULAR, **changes
    )


def mistaken(how: str) -> dict[str, Any]:
    return small(callbacks=[{"entrypoint": f"{CODE}:Mistaken", "config": {"how": how}}], **REGULAR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {
        name: [{"training": recorded(folder / name), "parallelism": parallelism}]
        for name, parallelism in LAYOUTS.items()
    }
    task = with_task("Classify") | {key: recorded(folder / "task")[key] for key in ("callbacks", *REGULAR)}
    runs["task"] = [{"training": task}]
    for name, first, then in (("resumed", {}, {}), ("cut", {}, CUT), ("joined", CUT, {}), ("cut again", CUT, CUT)):
        training = recorded(folder / name)
        runs[name] = [
            {"training": training, "parallelism": first, "stop_after": 5},
            {"training": training, "parallelism": then},
        ]
    # Stopped right after step 3, whose evaluation is not in the state of its checkpoint.
    training = recorded(folder / "stopped at 3")
    runs["stopped at 3"] = [{"training": training, "stop_after": 3}, {"training": training}]
    runs["without"] = [{"training": small(**REGULAR)}]
    runs["other"] = [{"training": mistaken("other"), "stop_after": 4}, {"training": mistaken("other")}]
    broken = {"entrypoint": f"{CODE}:Broken", "config": {"how": "number"}}
    runs["no context"] = [{"training": small(callbacks=[broken], **REGULAR)}]
    runs |= {how: [{"training": mistaken(how)}] for how in ("list", "object")}
    return run_cases(tmp_path_factory.mktemp("world"), 2, runs)


def calls(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"calls-{rank}.jsonl").read_text().splitlines()]


def final(folder: Path, rank: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / f"state-{rank}.pt", weights_only=True)
    return state


@pytest.mark.parametrize("name", [*LAYOUTS, "task"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_are_called_alike(results: dict[str, dict[str, Any]], folder: Path, name: str, rank: int) -> None:
    assert results[name]["errors"] == [None]
    found = calls(folder / name, rank)
    assert [call[:2] for call in found] == CALLS
    assert {(total, size) for _, _, total, size, _ in found} == {(6, 2)}
    for method, step, _, _, metrics in found:
        if method == "step":
            assert (set(metrics) >= LOGGED) if step % 2 == 0 else not metrics
        else:
            assert ("loss" in metrics) == (method == "evaluation")


@pytest.mark.parametrize("name", ["resumed", "cut", "joined", "cut again", "stopped at 3"])
def test_a_callbacks_state_goes_on_in_any_layout(results: dict[str, dict[str, Any]], folder: Path, name: str) -> None:
    assert results[name]["errors"][1] is None
    for rank in (0, 1):
        found, whole = final(folder / name, rank), final(folder / "dp2", rank)
        same_layout = name in ("resumed", "stopped at 3")
        require_same(found["sums"], whole["sums"], 0.0 if same_layout else 1e-10)
        assert found["found"] == (whole["found"] if same_layout else pytest.approx(whole["found"], rel=1e-10))
        kept = {key: count for key, count in found["counts"].items() if key != "checkpoint"}
        assert kept == {"start": 1, "step": 6, "evaluation": 2, "end": 1}
        assert [call[:2] for call in calls(folder / name, rank)].count(["start", 0]) == 1


def test_what_a_callback_draws_changes_nothing(results: dict[str, dict[str, Any]]) -> None:
    require_same(results["dp2"]["parameters"], results["without"]["parameters"], 0.0)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("list", f"`training.callbacks[0]`: {CODE}:Mistaken.state_dict() returned a list, expected a dictionary"),
        ("object", f"`training.callbacks[0]`: {CODE}:Mistaken.state_dict()['file'] is a pathlib"),
        ("other", f"`training.callbacks[0]`: {CODE}:Mistaken.load_state_dict raised KeyError: 'mean'; go on with"),
        ("no context", f"`training.callbacks[0]`: {CODE}:Broken.evaluating returned a int, expected a context manager"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_or_no_callback_takes_is_named(results, name, sentence):
    assert sentence in results[name]["errors"][-1]


@pytest.mark.parametrize(
    ("function", "config", "sentence"),
    [
        (
            "Mistaken",
            {"how": "unknown"},
            "returned a Mistaken with a method on_epoch, which nobody calls: a callback may",
        ),
        ("Mistaken", {"how": "half"}, "returned a Mistaken with state_dict and without load_state_dict: offer both"),
        ("Silent", {}, "returned a Silent without any method to call: a callback may offer on_start, on_step, on_eval"),
        ("Mistaken", {"what": 1}, "`training.callbacks[1].config` does not fit"),
    ],
)
def test_what_is_no_callback_is_refused_by_name(function: str, config: dict[str, Any], sentence: str) -> None:
    right = {"entrypoint": f"{CODE}:Mistaken", "config": {"how": ""}}
    training = Training(steps=1, callbacks=[right, {"entrypoint": f"{CODE}:{function}", "config": config}])
    with pytest.raises(InvalidConfiguration) as raised:
        build_callbacks(training, None)
    assert sentence in str(raised.value)
    assert "training.callbacks[1]" in str(raised.value)


def test_a_callback_that_raises_ends_the_job_with_its_name(tmp_path: Path) -> None:
    (rank,) = run_ranks(tmp_path, job(mistaken("raises")))
    sentence = f"`training.callbacks[0]`: {CODE}:Mistaken.on_step raised ValueError after step 2: no such figure"
    assert rank.code == 1
    assert (rank.report.error.reason, rank.report.error.message) == ("RankFailed", sentence)
    assert rank.report.error.signature.error == "ValueError"
    assert "callback_code.py:" in rank.report.error.signature.place
    assert sentence in rank.err


def test_an_outage_in_a_callback_may_pass() -> None:
    error = CallbackFailed("`training.callbacks[0]`: mine:Log.on_step raised ConnectionRefusedError")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert describe(error).signature is None
    assert describe(error).message == str(error)


@pytest.mark.parametrize("how", ["none", "fails"])
def test_a_context_that_fails_when_it_is_left_is_named(how: str) -> None:
    broken = {"entrypoint": f"{CODE}:Broken", "config": {"how": how}}
    (callback,) = build_callbacks(Training(steps=1, callbacks=[broken]), SimpleNamespace(rank=0, size=1)).every
    moment = SimpleNamespace(step=3)
    failing = pytest.raises(CallbackFailed) if how == "fails" else nullcontext()
    evaluated = []
    with failing as raised, callback.evaluating(moment):
        evaluated.append(how)
    assert evaluated == [how]
    if raised is not None:
        sentence = f"`training.callbacks[0]`: {CODE}:Broken.evaluating raised RuntimeError after step 3: no way back"
        assert str(raised.value) == sentence
