"""How much memory a training needs at least, in numbers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.memory import LeastMemory, ModelSize, builtin_size, in_words, least_memory
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.training import Training

ADAM, SERVERS = DataParallelMode.ALL_REDUCE, DataParallelMode.PARAMETER_SERVER
BILLION = ModelSize.of(10**9)


def training(model: dict[str, Any] | None = None, **changes: Any) -> Training:
    given_ = {"model": model or {"name": "mlp"}, "data": {"name": "digits"}, "steps": 1, "microBatchSize": 1, **changes}
    return Training.model_validate(given_, by_alias=True, by_name=False)


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        ({}, 4),
        ({"name": "Adam"}, 4),
        ({"name": "Muon"}, 3),
        ({"name": "Adafactor"}, 2),
        ({"name": "SGD"}, 2),
        ({"name": "SGD", "momentum": 0.9}, 3),
    ],
)
def test_a_rank_keeps_parameters_gradients_and_optimizer_state(optimizer: dict[str, Any], numbers: int) -> None:
    least = least_memory(BILLION, training(optimizer=optimizer), Mesh(replicate=2), ADAM)
    assert least == LeastMemory(whole=4 * 10**9, kept=numbers * 4 * 10**9, servers=0)
    assert least.peak == least.kept


def test_what_is_cut_is_kept_in_parts_but_built_whole() -> None:
    mesh = Mesh(pipeline=2, replicate=3, shard=4, tensor=5)
    least = least_memory(BILLION, training(), mesh, ADAM)
    assert least.kept == 16 * 10**9 // 40
    assert least.peak == least.whole == 4 * 10**9
    assert least.of_ranks(5) == least.whole, "one may build its model after the other"
    assert least.of_ranks(40) == 16 * 10**9
    meta = least_memory(BILLION, training({"name": "mlp", "metaDevice": True}), mesh, ADAM)
    assert meta.whole == 0
    assert meta.peak == least.kept


def test_servers_keep_the_optimizer_state() -> None:
    least = least_memory(BILLION, training(), Mesh(), SERVERS)
    assert least == LeastMemory(whole=4 * 10**9, kept=4 * 10**9, servers=12 * 10**9)


def test_what_is_not_trained_has_neither_gradient_nor_state() -> None:
    frozen = ModelSize(parameters=100, trained=10, bytes=400, trained_bytes=40)
    assert least_memory(frozen, training(), Mesh(), ADAM).kept == 400 + 40 + 80


def test_ranks_that_share_sequences_are_shards_where_there_are_any() -> None:
    assert least_memory(BILLION, training(), Mesh(shard=4, context=2), ADAM).kept == 16 * 10**9 // 8
    assert least_memory(BILLION, training(), Mesh(replicate=4, context=2), ADAM).kept == 16 * 10**9


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**15)
)  # fmt: skip
def test_all_ranks_together_hold_a_copy_for_each_replica(pipeline, replicate, shard, tensor, parameters):
    mesh = Mesh(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
    least = least_memory(ModelSize.of(parameters), training(), mesh, ADAM)
    whole = 16 * parameters * replicate
    assert whole - mesh.world_size < least.kept * mesh.world_size <= whole


def test_the_largest_model_that_a_manifest_can_ask_for_is_counted_at_once() -> None:
    resnet = training({"name": "resnet", "config": {"width": 4096, "blocks": [1_000_000] * 6}})
    mlp = training({"name": "mlp", "config": {"hiddenSizes": [1_000_000] * 100}})
    gpt = {"layers": 1000, "width": 1_000_000, "heads": 1000, "vocabularySize": 1_000_000, "experts": 10_000}
    data = {"name": "text"}
    sizes = [builtin_size(one) for one in (resnet, mlp, training({"name": "gpt", "config": gpt}, data=data))]
    for size, least in zip(sizes, (10**17, 9 * 10**13, 10**19), strict=True):
        assert size.parameters > least


def test_a_model_from_an_entry_point_has_a_size_that_only_building_tells() -> None:
    assert builtin_size(training({"entrypoint": "mine:make"})) is None


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (5 * 2**20, "5 MiB"), (2**35, "32.0 GiB"), (4 * 10**12, "3.6 TiB")],
)
def test_bytes_are_reported_in_a_unit_that_fits(size: int, text: str) -> None:
    assert in_words(size) == text
