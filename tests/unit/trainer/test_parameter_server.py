"""Parameters on servers: what workers push, and that they compute together with the servers what one process does."""

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.trainer.comparisons import ACCURACY, LOSS, require_same, require_same_figures, series
from tests.unit.trainer.loading_code import half_frozen
from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import run_cases, small, user

EVERY_STEP = {"logging": {"interval": 1, "tensorBoard": False}}
ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "nesterov": True, "weightDecay": 0.01}
COSINE = {"name": "Cosine", "warmupSteps": 2}
TRAINED = {
    "SGD": small(optimizer=SGD, lrSchedule=COSINE, evaluation={"interval": 2}, **EVERY_STEP),
    "AdamW": small(optimizer=ADAMW, microBatchSize=4, **EVERY_STEP),
    "plain SGD": small(optimizer={"name": "SGD", "learningRate": 0.1}, **EVERY_STEP),
    "tokens": small(model=user("double_tagger"), data=user("ragged_tokens"), **EVERY_STEP),
    "a parameter that is not used": small(model=user("partly_used"), **EVERY_STEP),
}
ASYNC = {"synchronization": "Async"}
BOUNDED = {"synchronization": "BoundedStaleness", "staleness": 2}
PARAMETERS = {"push": "Parameters"}
# Numbers of double_mlp: 6 x 16 + 16, 16 x 16 + 16, 16 x 5 + 5.
NUMBERS = 469


def a_run(training, settings=(), servers=1, **compression):
    """One run of a case."""
    return {
        "training": TRAINED[training],
        "settings": dict(settings),
        "servers": servers,
        "dataParallel": {"compression": compression} if compression else {},
    }


def stopped(first, second):
    return [{**first, "stop_after": 1}, second]


# What is trained stands behind the comma.
ONE_WORKER = {
    "async, SGD": [a_run("SGD", ASYNC)],
    "async on three servers, AdamW": [a_run("AdamW", ASYNC, 3)],
    "bounded on three servers, SGD": [a_run("SGD", BOUNDED, 3)],
    "changes, plain SGD": [a_run("plain SGD", PARAMETERS | ASYNC)],
    "changes, SGD": [a_run("SGD", PARAMETERS | ASYNC, 3)],
    "changes, AdamW": [a_run("AdamW", PARAMETERS | ASYNC | {"stalenessAwareRate": True}, 2)],
    "changes in Sync, AdamW": [a_run("AdamW", PARAMETERS, 2)],
    "all of TopK, AdamW": [a_run("AdamW", ASYNC, 2, name="TopK", ratio=1.0)],
}
IN_SYNC = {f"gradients, {name}": [a_run(name, servers=1 + index % 3)] for index, name in enumerate(TRAINED)}
TWO_WORKERS = IN_SYNC | {
    "stopped, AdamW": stopped(a_run("AdamW"), a_run("AdamW", servers=3)),
    "stopped, a parameter that is not used": stopped(
        a_run("a parameter that is not used"), a_run("a parameter that is not used", servers=3)
    ),
    "changes, plain SGD": [a_run("plain SGD", PARAMETERS)],
    "changes, SGD": [a_run("SGD", PARAMETERS, 3)],
    "changes after a stop, SGD": stopped(a_run("SGD", PARAMETERS, 2), a_run("SGD", PARAMETERS, 3)),
    "all of TopK, SGD": [a_run("SGD", (), 2, name="TopK", ratio=1.0)],
    "all of RandomK, AdamW": [a_run("AdamW", (), 3, name="RandomK", ratio=1.0)],
    "a long warm-up of OneBit, SGD": [a_run("SGD", (), 2, name="OneBit", warmupSteps=6)],
    "a long warm-up of TopK, AdamW": [
        a_run("AdamW", (), 2, name="TopK", ratio=1.0, warmupSteps=4, momentumCorrection=0.0)
    ],
}
# Numbers as float64. Six ranges on one server: 96, 16, 256, 16, 80 and 5 numbers, of which each has blocks of 256 and
# 8 to a byte of its own, and a tenth of each, rounded up, is 10 + 2 + 26 + 2 + 8 + 1.
BYTES = {
    "as it is": ({}, 8 * NUMBERS),
    "FP16": ({"name": "FP16"}, 2 * NUMBERS),
    "BF16": ({"name": "BF16"}, 2 * NUMBERS),
    "Int8": ({"name": "Int8"}, NUMBERS + 6 * 8),
    "OneBit": ({"name": "OneBit"}, 12 + 2 + 32 + 2 + 10 + 1 + 6 * 8),
    "TopK": ({"name": "TopK", "ratio": 0.1}, 49 * (8 + 4)),
    "RandomK": ({"name": "RandomK", "ratio": 0.1}, 49 * 8),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    cases = {name: [{"training": training}] for name, training in TRAINED.items()}
    return run_cases(tmp_path_factory.mktemp("one"), 1, cases)


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    return run_server_cases(tmp_path_factory.mktemp("worker"), 1, ONE_WORKER)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    sizes = {f"bytes of {name}": [a_run("plain SGD", **compression)] for name, (compression, _) in BYTES.items()}
    return run_server_cases(tmp_path_factory.mktemp("workers"), 2, TWO_WORKERS | sizes)


@pytest.mark.parametrize("name", ONE_WORKER)
def test_one_worker_is_one_process(one_process, one_worker, name):
    assert one_worker[name]["errors"] == [[None]]
    require_same(one_worker[name]["parameters"], one_process[name.rpartition(", ")[2]]["parameters"])


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_two_workers_in_sync_are_one_process(one_process, two_workers, name):
    for errors in two_workers[name]["errors"]:
        assert errors[-1] is None
        assert all("Stopped" in error for error in errors[:-1])
    require_same(two_workers[name]["parameters"], one_process[name.rpartition(", ")[2]]["parameters"])


@pytest.mark.parametrize("name", IN_SYNC)
def test_metrics_are_those_of_one_process(one_process, two_workers, name):
    found, expected = two_workers[name], one_process[name.rpartition(", ")[2]]
    require_same_figures(found, expected, (LOSS, "grad_norm", "lr"))
    # Not all have held-out samples.
    assert series(found, ACCURACY) == pytest.approx(series(expected, ACCURACY))


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_push(two_workers, name):
    # The leader may have pushed one part of a step or both.
    found, expected = two_workers[f"bytes of {name}"], BYTES[name][1]
    sent = series(found, "comm/gradient_bytes")
    assert found["errors"] == [[None], [None]]
    assert sent
    assert {one % expected for one in sent} == {0}
    assert max(sent) in (expected, 2 * expected)


def test_what_is_not_trained_is_that_of_the_weights_on_every_worker(tmp_path):
    """Red where the leader alone reads it: servers hold what is trained."""
    torch.manual_seed(5)
    weights = {name: torch.randn_like(value) for name, value in half_frozen().state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    case = small(
        model={"entrypoint": "tests.unit.trainer.loading_code:half_frozen"},
        checkpoint={"initialFrom": str(tmp_path / "weights.safetensors")},
        **EVERY_STEP,
    )
    runs = [{"training": case, "settings": {}, "servers": 1, "dataParallel": {}}]
    one = run_cases(tmp_path / "one", 1, {"case": runs})["case"]
    two = run_server_cases(tmp_path / "two", 2, {"case": runs})["case"]
    assert series(two) == pytest.approx(series(one), rel=1e-10)
    require_same(two["parameters"], one["parameters"], 1e-10)


def test_adapters_that_go_on_need_the_files_of_what_they_adapt(tmp_path):
    model = {"name": "transformers", "config": {"config": described("llama"), "lora": {"rank": 2}, "sequenceLength": 8}}
    case = small(model=model, data=user("double_tokens"), checkpoint={"folder": "another-job"}, steps=1)
    runs = [{"training": case, "settings": {}, "servers": 1, "dataParallel": {}}]
    found = run_server_cases(tmp_path, 2, {"case": runs})["case"]
    assert {error.partition(": with")[0] for errors in found["errors"] for error in errors} == {
        "InvalidConfiguration: `training.checkpoint.folder`"
    }
