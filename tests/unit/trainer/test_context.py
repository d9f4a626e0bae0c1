"""What ranks of a context group compute, and what cannot be computed in parts. That it adds up to what one process
computes: test_layouts.py."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain_api.mesh import Mesh
from disttrain_trainer.metrics.report import THROUGHPUT
from disttrain_trainer.parallel.context.ring import Ring
from disttrain_trainer.parallel.context.ulysses import Ulysses
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.mesh import World
from tests.unit.trainer.context_code import of_parts
from tests.unit.trainer.worlds import run_cases, small, user

TOKENS = {"data": user("double_tokens")}
CONTEXT = {"contextParallelDegree": 2}
RING = {**CONTEXT, "contextParallelMethod": "Ring"}
REFUSED = {
    "no method": (
        small(model=of_parts("partless"), **TOKENS),
        "the model Sequential has no method `use_context`, which makes it compute parts of sequences",
    ),
    "heads": (
        small(model=user("double_gpt", heads=3, width=12), **TOKENS),
        "3 heads of attention must be a multiple of 2, and 3 of keys a multiple of it or a divisor",
    ),
    "lengths": (
        small(model=user("double_gpt", sequenceLength=9), data=user("ragged_tokens")),
        "the sequences of `training.data` are 9 long, which must be a multiple of 2",
    ),
    "one class of a sample": (
        small(model=user("double_gpt"), data=user("double_samples")),
        "needs samples of `training.data` with a class for each of T tokens",
    ),
    "built-in sizes": (
        small(model={"name": "gpt", "config": {"heads": 3, "width": 12}}, data={"name": "text"}),
        "spec.training.model.config.heads: 3 must be a multiple of `contextParallelDegree`, which is 2",
    ),
}
REFUSED_ON_A_RING = {
    "dropout": (
        small(model=user("double_gpt", dropout=0.1), **TOKENS),
        "`parallelism.contextParallelMethod` Ring computes attention without dropout, found 0.1",
    ),
    "own kernel": (
        small(model=of_parts("own_kernel"), **TOKENS),
        "`parallelism.contextParallelMethod` Ring computes causal attention to all tokens before, and a layer of",
    ),
    "lengths of a ring": (
        small(model=user("double_gpt", sequenceLength=9), data=user("ragged_tokens")),
        "the sequences of `training.data` are 9 long, which must be a multiple of 4",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where ranks write what they compute."""
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    cases = {name: [{"training": training, "parallelism": CONTEXT}] for name, (training, _) in REFUSED.items()}
    cases |= {name: [{"training": one, "parallelism": RING}] for name, (one, _) in REFUSED_ON_A_RING.items()}
    watched = small(steps=1, model=of_parts("watched_gpt", folder=str(folder)), **TOKENS)
    cases["watched"] = [{"training": watched, "parallelism": CONTEXT}]
    return run_cases(tmp_path_factory.mktemp("context"), 2, cases)


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_ON_A_RING])
def test_what_cannot_be_computed_in_parts_is_refused_by_name(results, case):
    (error,) = results[case]["errors"]
    assert error is not None
    assert error.startswith("InvalidConfiguration: ")
    assert (REFUSED | REFUSED_ON_A_RING)[case][1] in error


@pytest.fixture(scope="module")
def written(results, folder):
    """The first microbatch of each rank."""
    assert results["watched"]["errors"] == [None]
    return [json.loads((folder / f"rank-{rank}.jsonl").read_text().splitlines()[0]) for rank in range(2)]


def test_each_rank_computes_its_part_of_the_same_sequences(written):
    first, second = (torch.tensor(one["tokens"]) for one in written)
    assert first.shape == second.shape == (24, 4)
    # Each token is as far from the one before it as that is from its own: only whole sequences go on so.
    whole = torch.cat([first, second], 1)
    steps = whole.diff(dim=1) % 16
    assert torch.equal(steps, steps[:, :1].expand_as(steps))


def test_a_ring_computes_in_the_format_of_autocast():
    # Rotary embeddings leave queries and keys in FP32, and values are what a linear layer has made of them.
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    alone = Ring.__new__(Ring)
    alone.index, alone.degree = 0, 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = alone.causal_attention(query, key, value.bfloat16())
        expected = functional.scaled_dot_product_attention(query, key, value.bfloat16(), is_causal=True)
    assert found.dtype is expected.dtype is torch.bfloat16
    assert torch.allclose(found, expected, rtol=2**-7)


@pytest.mark.parametrize("degree", [2, 3])
def test_each_rank_of_a_ring_attends_to_as_many_tokens(degree):
    def part(index):
        ring = Ring.__new__(Ring)
        ring.index, ring.degree = index, degree
        return ring.positions(4, torch.device("cpu"))

    parts = [part(index) for index in range(degree)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(4 * degree))
    assert len({int((positions + 1).sum()) for positions in parts}) == 1


def test_attention_stays_out_of_compiled_graphs():
    compiling = []

    class Noting(Ulysses):
        def attend(self, query, key, value, attention):
            compiling.append(torch.compiler.is_compiling())
            return query

    part = Noting.__new__(Noting)
    part.stay_out_of_graphs()
    compiled = torch.compile(lambda x: part.attend(x + 1, x, x, None) * 2, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert compiling == [False]


def test_each_rank_draws_its_own_dropout(written):
    first, second = (one["noise"] for one in written)
    assert any(first)
    assert any(second)
    assert first != second


def test_throughput_counts_a_sample_once_and_every_token_once(results):
    (line,) = [line for line in results["watched"]["metrics"] if "lr" in line]
    # Both are of the same seconds, and tokens are of one rank.
    tokens_of_a_sample = line["throughput(tps)"] * 2 / line[THROUGHPUT]
    assert tokens_of_a_sample == pytest.approx(8)


@pytest.mark.parametrize("mesh", [Mesh(replicate=2, context=2), Mesh(replicate=2, shard=2, context=4)], ids=str)
def test_a_sample_counts_once_and_every_token_once(mesh):
    nowhere: Any = SimpleNamespace()
    worlds = [
        World(rank, mesh.world_size, Device(torch.device("cpu"), "gloo"), mesh, nowhere, nowhere)
        for rank in range(mesh.world_size)
    ]
    assert [world.replica for world in worlds if world.counts_replica] == list(range(mesh.data_parallel))
    assert [world.part for world in worlds if world.counts_outputs] == list(range(mesh.parts))
