"""Shards take what they can make fit, and name what they cannot take before or where it fails."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training
from disttrain_trainer.parallel import sharded
from disttrain_trainer.parallel.shardable import joined
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.comparisons import LOSS, require_same_figures
from tests.unit.trainer.layouts import ACCUMULATE_2, ADAMW, OFFLOAD, PIPELINE, REPLICATE, SHARD
from tests.unit.trainer.shard_code import of_shards
from tests.unit.trainer.worlds import run_cases, small, user

HELD = small(model=of_shards("held"), optimizer=ADAMW, logging={"interval": 1}, maxGradientNorm=0.3)
ALL_USED = {**HELD, "model": of_shards("held", unused=False)}
LAYERS = {**HELD, "model": of_shards("odd_layers")}
# ranks, training, parallelism
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (2, HELD, {SHARD: 2}),
    "fsdp2, accumulated": (2, HELD | ACCUMULATE_2, {SHARD: 2}),
    "dp2, offloaded": (2, HELD | OFFLOAD, {}),
    "dp2 x fsdp2": (4, HELD | ACCUMULATE_2, {REPLICATE: 2, SHARD: 2}),
    "pp2 x fsdp2": (4, LAYERS | ACCUMULATE_2, {PIPELINE: 2, SHARD: 2}),
}
FLOATS = user("float_samples")
SHARDS = {SHARD: 2}
METHOD = (
    "`training.model`: Around uses parameters of `blocks.1` (Block) without calling it, and shards gather them when it "
    "is called: call the layer, not its parts (at shard_code.py line "
)
FORMATS = (
    "`training.model`: shards gather the parameters of a Mixed together, and `1.weight` is float64 where `1.other` is "
    "float32: give them one format, freeze the one, or put it into a layer of its own, as `layers()` of the model or an"
    " nn.Sequential has them"
)
COMPLEX = (
    "`training.model`: the parameter `{}` is {}, and shards sum gradients of real numbers: hold it as real ones "
    "(torch.view_as_real), or use replicas"
)
HALVES = (
    "`training.precision` BF16: `1.0` (Masked) computes with numbers of several formats; shards cast parameters and "
    "inputs of layers, and neither buffers nor what a layer makes itself: cast these to the inputs' format"
)
TWICE = (
    "`training.model`: Reentrant computes `block.inner.bias` anew in the backward pass, which DDP meets twice: set "
    "`parallelism.dataParallel.staticGraph: true`, or call torch's checkpoint with use_reentrant=False"
)
UNLIKE = (
    "`training.model`: rank 0 {} where rank 1 {}: shards gather a layer from all ranks, which must use the same layers "
    "in the same order; draw what is left out alike on all ranks (a generator of its own with one seed), or use "
    "replicas"
)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "formats beside each other": (small(model=of_shards("mixed", kind="float32")), SHARDS, FORMATS),
    "complex beside real": (
        small(model=of_shards("mixed", kind="complex128")), SHARDS, COMPLEX.format("1.other", "complex128")
    ),
    "complex alone": (
        small(model=of_shards("turned"), data=FLOATS), SHARDS, COMPLEX.format("0.by", "complex64")
    ),
    "another method": (small(model=of_shards("around", how="method")), SHARDS, METHOD),
    "a weight": (small(model=of_shards("around", how="weight")), SHARDS, METHOD),
    "halves beside a buffer": (small(model=of_shards("masked"), data=FLOATS, precision="BF16"), SHARDS, HALVES),
    "recomputed in the old way, searched": (
        small(model=of_shards("reentrant")), {"dataParallel": {"findUnusedParameters": True}}, TWICE
    ),
    "another layer on each rank": (
        small(model=of_shards("choosing", how="another")), SHARDS, UNLIKE.format("calls `layers.1`", "calls `layers.2`")
    ),
    "another layer on each rank, in the last step": (
        small(model=of_shards("choosing", how="another"), steps=4),
        SHARDS,
        UNLIKE.format("calls `layers.1`", "calls `layers.2`"),
    ),
}  # fmt: skip
TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "formats, one frozen": (small(model=of_shards("mixed", kind="float32", trained=False)), SHARDS),
    "complex, replicas": (small(model=of_shards("turned"), data=FLOATS), {}),
    "recomputed": (small(model=of_shards("reentrant")), {}),
    "recomputed, static graph": (small(model=of_shards("reentrant")), {"dataParallel": {"staticGraph": True}}),
    "recomputed, shards": (small(model=of_shards("reentrant")), SHARDS),
    "some of the layers": (small(model=of_shards("choosing", how="same")), SHARDS),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {"held": [{"training": HELD}], "all used": [{"training": ALL_USED}], "layers": [{"training": LAYERS}]}
    cases |= {name: [{"training": training}] for name, (training, _) in TAKEN.items()}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


def run_in(ranks: int, folders: pytest.TempPathFactory, **more: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    cases = {
        name: [{"training": training, "parallelism": parallelism}]
        for name, (size, training, parallelism) in LAYOUTS.items()
        if size == ranks
    }
    return run_cases(folders.mktemp(f"world-of-{ranks}"), ranks, cases | more)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    more = {
        name: [{"training": training, "parallelism": parallelism}]
        for name, (training, parallelism, *_) in (REFUSED | TAKEN).items()
    }
    cut, copied = ({"training": ALL_USED, "parallelism": parallelism} for parallelism in (SHARDS, {}))
    more["shards, then replicas"] = [cut | {"stop_after": 3}, copied]
    more["replicas, then shards"] = [copied | {"stop_after": 3}, cut]
    return run_in(2, tmp_path_factory, **more)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_in(4, tmp_path_factory)


def require_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["errors"][-1] is None
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        assert found["parameters"][name].shape == value.shape
        torch.testing.assert_close(found["parameters"][name], value, rtol=1e-10, atol=1e-12, msg=name)
    require_same_figures(found, expected, (LOSS, "grad_norm"))


@pytest.mark.parametrize("layout", [name for name, (ranks, *_) in LAYOUTS.items() if ranks == 2])
def test_what_cannot_be_cut_trains_as_in_one_process(alone, two, layout):
    require_alike(two[layout], alone["held"])


@pytest.mark.parametrize("layout", [name for name, (ranks, *_) in LAYOUTS.items() if ranks == 4])
def test_beside_other_degrees_too(alone, four, layout):
    """4 ranks."""
    require_alike(four[layout], alone["layers" if layout.startswith("pp") else "held"])


@pytest.mark.parametrize("change", ["shards, then replicas", "replicas, then shards"])
def test_a_checkpoint_of_it_goes_on_in_another_layout(alone, two, change):
    assert two[change]["errors"][0].startswith("Stopped")
    require_alike(two[change], alone["all used"])


def test_whole_numbers_move(alone: dict[str, dict[str, Any]]) -> None:
    """So that equality above is not that of standing still."""
    found = alone["held"]["parameters"]
    assert found["temperature"] != 1.5
    assert found["blocks.0.odd.gate"] != 0.7
    assert found["blocks.0.odd.unused"] == torch.tensor(0.3).double()


@pytest.mark.parametrize("case", TAKEN)
def test_what_shards_take_passes(alone: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]], case: str) -> None:
    assert two[case]["errors"] == [None]
    for name, value in alone[case]["parameters"].items():
        torch.testing.assert_close(two[case]["parameters"][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", REFUSED)
def test_what_they_cannot_take_is_named(two: dict[str, dict[str, Any]], case: str) -> None:
    (error,) = two[case]["errors"]
    assert error.startswith("InvalidConfiguration: ")
    assert REFUSED[case][2] in error


class Chain(nn.ModuleDict):
    """A container that can be called, which torch 2.11 does not cut."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def chain() -> Chain:
    return Chain({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})


@pytest.fixture
def one() -> Iterator[Any]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.of(Parallelism(), 1)
    cut = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    yield SimpleNamespace(mesh=mesh, device=Device(torch.device("cpu"), "gloo"), device_mesh=cut)
    dist.destroy_process_group()


WITH_CONTAINERS: dict[str, tuple[nn.Module, list[str]]] = {
    "the model": (chain(), []),
    "a layer": (nn.Sequential(chain(), nn.Linear(4, 4)), ["0", "1"]),
}


def refusing(*_: object, **__: object) -> None:
    raise ValueError("fully_shard does not support containers that do not implement forward: ...")


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize("case", WITH_CONTAINERS)
def test_a_container_is_cut_or_named(one: Any, monkeypatch: pytest.MonkeyPatch, case: str, refuses: bool) -> None:
    """The installed torch may do either."""
    if refuses:
        monkeypatch.setattr(sharded, "fully_shard", refusing)
    built, units = WITH_CONTAINERS[case]
    model = copy.deepcopy(built)
    training = Training.model_validate(small())
    try:
        found = sharded.shard(model, [model.get_submodule(unit) for unit in units], training, one, in_turn=True)
    except InvalidConfiguration as error:
        message = str(error)
    else:
        message = "" if isinstance(found, FSDPModule) and found(torch.ones(2, 4)).shape == (2, 4) else "not cut"
    named = (
        f"`training.model`: torch {torch.__version__} cannot cut Chain, an nn.ModuleDict with a forward of its own,"
        " over shards; torch 2.13 can: use an image that has it, or make Chain an nn.Module with the nn.ModuleDict"
        " as an attribute"
    )
    assert message in ([named] if refuses else [named, ""])


def test_layers_of_vectors_alone_are_gathered_with_the_next() -> None:
    wide, narrow = nn.Linear(4, 4), nn.LayerNorm(4)
    double = nn.Linear(4, 4).double()
    units = [nn.LayerNorm(4), nn.LayerNorm(4), wide, nn.Linear(4, 4), narrow, double, nn.LayerNorm(4)]
    assert [[units.index(unit) for unit in group] for group in joined(units)] == [[0, 1, 2], [3], [4], [5], [6]]


@pytest.mark.parametrize(
    ("in_turn", "precision", "together"), [(True, "FP32", True), (False, "FP32", False), (True, "BF16", False)]
)
def test_only_layers_that_all_run_in_one_format_are_gathered_together(
    one: Any, in_turn: bool, precision: str, together: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    training = Training.model_validate(small(precision=precision))
    sharded.shard(model, list(model), training, one, in_turn=in_turn)
    groups = len(sharded.parameter_groups(model))
    assert groups == (2 if together else 3)


def test_what_is_reduced_is_said_when_it_changes_alone(monkeypatch):
    class Sharded(nn.Module):
        said: ClassVar[list[bool]] = []

        def set_requires_all_reduce(self, now: bool) -> None:
            self.said.append(now)

    monkeypatch.setattr(sharded, "FSDPModule", Sharded)
    model = Sharded()
    for now in (True, True, False, False, True, True):
        sharded.reduce_gradients(model, now)
    assert model.said == [False, True]
