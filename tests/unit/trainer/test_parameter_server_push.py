"""What workers push to servers: gradients, whole or compressed, or what they have changed themselves."""

import pytest

from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.worlds import require_same, run_cases, small

EVERY_STEP = {"logging": {"interval": 1, "tensorBoard": False}}
TOLERANCE = 1e-10
TRAINED = {
    "plain SGD": small(optimizer={"name": "SGD", "learningRate": 0.1}, **EVERY_STEP),
    "SGD": small(
        optimizer={"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "nesterov": True, "weightDecay": 0.01},
        lrSchedule={"name": "Cosine", "warmupSteps": 2},
        **EVERY_STEP,
    ),
    "AdamW": small(optimizer={"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}, **EVERY_STEP),
}
PARAMETERS = {"push": "Parameters"}
ASYNC = {"synchronization": "Async"}
# Numbers of double_mlp: 6 x 16 + 16, 16 x 16 + 16, 16 x 5 + 5.
NUMBERS = 469


def pushed(training, settings=(), servers=1, **data_parallel):
    """One run of a case."""
    return {
        "training": TRAINED[training],
        "settings": dict(settings),
        "servers": servers,
        "dataParallel": data_parallel,
    }


def compressed(training, settings=(), servers=1, **compression):
    return pushed(training, settings, servers, compression=compression)


ONE_WORKER = {
    "changes, plain SGD": [pushed("plain SGD", PARAMETERS | ASYNC)],
    "changes, SGD": [pushed("SGD", PARAMETERS | ASYNC, 3)],
    "changes, AdamW": [pushed("AdamW", PARAMETERS | ASYNC | {"stalenessAwareRate": True}, 2)],
    "changes in Sync, AdamW": [pushed("AdamW", PARAMETERS, 2)],
    "all of TopK, AdamW": [compressed("AdamW", ASYNC, 2, name="TopK", ratio=1.0)],
}
TWO_WORKERS = {
    "changes, plain SGD": [pushed("plain SGD", PARAMETERS)],
    "changes, SGD": [pushed("SGD", PARAMETERS, 3)],
    "changes after a stop, SGD": [{**pushed("SGD", PARAMETERS, 2), "stop_after": 1}, pushed("SGD", PARAMETERS, 3)],
    "all of TopK, SGD": [compressed("SGD", (), 2, name="TopK", ratio=1.0)],
    "all of RandomK, AdamW": [compressed("AdamW", (), 3, name="RandomK", ratio=1.0)],
    "a long warm-up of OneBit, SGD": [compressed("SGD", (), 2, name="OneBit", warmupSteps=6)],
    "a long warm-up of TopK, AdamW": [
        compressed("AdamW", (), 2, name="TopK", ratio=1.0, warmupSteps=4, momentumCorrection=0.0)
    ],
}
BYTES = {
    "as it is": pushed("plain SGD"),
    **{name: compressed("plain SGD", name=name) for name in ("FP16", "BF16", "Int8", "OneBit")},
    **{name: compressed("plain SGD", name=name, ratio=0.1) for name in ("TopK", "RandomK")},
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
    cases = {**TWO_WORKERS, **{f"bytes of {name}": [run] for name, run in BYTES.items()}}
    return run_server_cases(tmp_path_factory.mktemp("workers"), 2, cases)


@pytest.mark.parametrize("name", ONE_WORKER)
def test_one_worker_is_one_process(one_process, one_worker, name):
    assert one_worker[name]["errors"] == [[None]]
    require_same(one_worker[name]["parameters"], one_process[name.rpartition(", ")[2]]["parameters"])


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_two_workers_in_sync_are_one_process(one_process, two_workers, name):
    assert two_workers[name]["errors"][0][-1] is None
    require_same(two_workers[name]["parameters"], one_process[name.rpartition(", ")[2]]["parameters"])


# Numbers as float64. Six ranges on one server: 96, 16, 256, 16, 80 and 5 numbers, of which each has blocks of 256 and
# 8 to a byte of its own, and a tenth of each, rounded up, is 10 + 2 + 26 + 2 + 8 + 1.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("as it is", 8 * NUMBERS),
        ("FP16", 2 * NUMBERS),
        ("BF16", 2 * NUMBERS),
        ("Int8", NUMBERS + 6 * 8),
        ("OneBit", 12 + 2 + 32 + 2 + 10 + 1 + 6 * 8),
        ("TopK", 49 * (8 + 4)),
        ("RandomK", 49 * 8),
    ],
)
def test_bytes_of_a_push(two_workers, name, expected):
    # The leader may have pushed one part of a step or both.
    found = two_workers[f"bytes of {name}"]
    sent = [line["comm/gradient_bytes"] for line in found["metrics"] if "comm/gradient_bytes" in line]
    assert found["errors"] == [[None], [None]]
    assert sent
    assert {one % expected for one in sent} == {0}
    assert max(sent) in (expected, 2 * expected)
