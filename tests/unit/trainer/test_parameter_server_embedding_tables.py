"""Tables whose rows lie on servers: what workers pull and push, and that it is what the dense model computes."""

import os
from array import array
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disttrain_trainer.parameter_server.worker.embedding_tables import EmbeddingTables, let_go
from tests.unit.trainer.comparisons import require_same, require_same_figures
from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.table_code import ROWS, WIDTH
from tests.unit.trainer.worlds import run_cases, small


def table(function, **config):
    return {"entrypoint": f"tests.unit.trainer.table_code:{function}", "config": config}


def trained(model="tabled", **changes):
    """Plain SGD, for which rows that nobody touches stay as they are in the dense model, too."""
    config = changes.pop("config", {})
    return small(
        model=table(model, **config),
        data=table("row_samples"),
        optimizer={"name": "SGD", "learningRate": 0.5},
        logging={"interval": 1, "tensorBoard": False},
        **changes,
    )


ASYNC = {"synchronization": "Async"}
SYNC_CASES = {
    "two servers": [{"training": trained(), "servers": 2}],
    "many microbatches": [{"training": trained(microBatchSize=4, evaluation={"interval": 2}), "servers": 3}],
    "stopped": [{"training": trained(), "servers": 1, "stop_after": 1}, {"training": trained(), "servers": 3}],
    "lazy Adam": [{"training": {**trained(), "optimizer": {"name": "Adam", "learningRate": 0.01}}, "servers": 2}],
}
REFUSED = {
    "as a whole": (
        {"training": trained("whole")},
        "embed.weight of an embedding with sparse=True is also used as a whole",
    ),
    "tied": ({"training": trained("tied")}, "embed.weight of an embedding with sparse=True is also head.weight"),
    "max_norm": ({"training": trained(config={"max_norm": 1.0})}, "embed.weight has max_norm"),
    "compressed": (
        {"training": trained(), "dataParallel": {"compression": {"name": "Int8"}}},
        "`parallelism.dataParallel.compression` conflicts with embed.weight",
    ),
    "parameters": (
        {"training": trained(), "settings": {"push": "Parameters"}},
        "`parallelism.dataParallel.parameterServer.push: Parameters` conflicts with embed.weight",
    ),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    cases = {
        "dense": [{"training": trained(config={"sparse": False})}],
        "clipped": [{"training": trained(config={"sparse": False}, maxGradientNorm=0.1)}],
    }
    return run_cases(tmp_path_factory.mktemp("dense"), 1, cases)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    return run_server_cases(tmp_path_factory.mktemp("two"), 2, SYNC_CASES)


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    cases = {
        "async": [{"training": trained(), "settings": ASYNC, "servers": 3}],
        "clipped": [{"training": trained(maxGradientNorm=0.1), "settings": ASYNC, "servers": 2}],
        **{name: [run] for name, (run, _) in REFUSED.items()},
    }
    return run_server_cases(tmp_path_factory.mktemp("one"), 1, cases)


def test_a_row_is_pulled_once_in_a_task_also_for_recomputation():
    asked = []
    model = nn.EmbeddingBag(9, 2, sparse=True)
    tables = EmbeddingTables({"weight": model}, lambda name, places: asked.append(places.tolist()))
    rows = torch.tensor([[1, 4, 1], [7, 4, 4]])
    tables.pulled(whole=False)
    checkpoint(model, rows, use_reentrant=False).sum().backward()
    model(rows[:, :1])
    model(torch.tensor([[0, 7]]))
    assert asked == [[1, 4, 7], [0]]
    taken = tables.take_gradients()["weight"]
    assert taken.places.tolist() == [1, 4, 7]
    torch.testing.assert_close(taken.values[:, 0], torch.tensor([2 / 3, 1.0, 1 / 3]))
    assert model.weight.grad is None
    tables.pulled(whole=True)
    model(rows)
    tables.pulled(whole=False)
    model(rows)
    assert asked == [[1, 4, 7], [0], [1, 4, 7]]


def test_a_worker_holds_the_pages_of_the_rows_that_it_has_alone():
    weight = nn.Parameter(torch.ones(2**18, 64))
    assert resident_bytes(weight) > 0.9 * weight.nbytes
    let_go(weight)
    weight.data[torch.tensor([5, 200_000])] = 2.0
    assert 0 < resident_bytes(weight) < 0.1 * weight.nbytes
    assert weight.shape == (2**18, 64)
    assert weight.data[199_999:200_002, 0].tolist() == [0.0, 2.0, 0.0]


def resident_bytes(weight):
    """How much of it is in memory (proc(5), pagemap: bit 63 of a page's entry)."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = weight.data_ptr() // page
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(8 * first)
        read = array("Q", entries.read(8 * (weight.nbytes // page)))
    return page * sum(entry >> 63 for entry in read)


@pytest.mark.parametrize("name", [name for name in SYNC_CASES if name != "lazy Adam"])
def test_two_workers_in_sync_are_the_dense_model(dense, two_workers, name):
    assert two_workers[name]["errors"][0][-1] is None
    require_same(two_workers[name]["parameters"], dense["dense"]["parameters"])


@pytest.mark.parametrize(("name", "expected"), [("async", "dense"), ("clipped", "clipped")])
def test_one_worker_is_the_dense_model(dense, one_worker, name, expected):
    assert one_worker[name]["errors"] == [[None]]
    require_same(one_worker[name]["parameters"], dense[expected]["parameters"])


def test_norms_count_rows(dense, two_workers, one_worker):
    for found, reference in ((two_workers["two servers"], "dense"), (one_worker["clipped"], "clipped")):
        require_same_figures(found, dense[reference], ["grad_norm"], steps=6)


def test_rows_that_no_batch_has_touched_are_those_of_the_beginning(two_workers, dense):
    begin = dense["dense"]["parameters"]["embed.weight"]
    found = two_workers["lazy Adam"]["parameters"]["embed.weight"]
    assert two_workers["lazy Adam"]["errors"] == [[None], [None]]
    touched = (found != begin).any(1)
    assert 20 < touched.sum() < 70


def test_what_is_sent_is_far_below_the_table(two_workers):
    lines = [line for line in two_workers["two servers"]["metrics"] if "comm/gradient_bytes" in line]
    # A part of twelve samples touches at most 59 rows of the embedding, 60 of the bag; 25 numbers are dense.
    part = (59 + 60) * (8 + WIDTH * 8) + 25 * 8
    assert len(lines) == 6
    assert all(0 < line["comm/gradient_bytes"] <= 2 * part < ROWS * WIDTH * 8 for line in lines)
    assert all(0 < line["servers/pulled_bytes"] <= 2 * part for line in lines[1:-1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_tables_is_refused(one_worker, name):
    [[error]] = one_worker[name]["errors"]
    assert error.startswith("InvalidConfiguration")
    assert REFUSED[name][1] in error
