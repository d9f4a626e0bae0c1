"""Models that are built without memory: alike in every layout, and never whole on a rank that keeps a part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disttrain_api.names import ExitCode
from disttrain_trainer.parallel.meta import build_on_meta, materialise
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.comparisons import LOSS, require_same_figures
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.worlds import job, run_layouts, run_ranks, small, user

TOLERANCE = 1e-10
SHARD, TENSOR = "dataParallelShardDegree", "tensorParallelDegree"


def built(**config: Any) -> dict[str, Any]:
    return {**user("double_gpt", **config), "metaDevice": True}


COMMON = {"data": user("double_tokens"), "steps": 3, "logging": {"interval": 1}}
TRAININGS = {
    "tied": small(**COMMON, model=built()),
    "untied": small(**COMMON, model=built(tieWeights=False)),
    "experts": small(**COMMON, model=built(experts=4)),
}
# ranks, training, parallelism, changes of the training
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, "tied", {}, {}),
    "two devices": (1, "tied", {"devicesPerProcess": 2}, {}),
    "fsdp2": (2, "tied", {SHARD: 2}, {}),
    "fsdp2, untied": (2, "untied", {SHARD: 2}, {}),
    "fsdp2, offloaded, recomputed": (
        2,
        "tied",
        {SHARD: 2},
        {"offload": {"parameters": True}, "activationCheckpointing": "Full"},
    ),
    "tp2": (2, "tied", {TENSOR: 2}, {}),
    "pp2": (2, "tied", {"pipelineParallelDegree": 2}, {}),
    "pp2 x fsdp2": (4, "untied", {"pipelineParallelDegree": 2, SHARD: 2}, {}),
    "tp2, vocabulary": (2, "untied", {TENSOR: 2, "vocabularyParallel": True}, {}),
    "experts over fsdp2": (2, "experts", {SHARD: 2, "expertParallelDegree": 2}, {}),
    "experts over tp2": (2, "experts", {TENSOR: 2, "expertParallelDegree": 2}, {}),
    "fsdp2 x tp2": (4, "tied", {SHARD: 2, TENSOR: 2}, {}),
    "dp2 x tp2": (4, "untied", {"dataParallelReplicateDegree": 2, TENSOR: 2}, {}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    alone: dict[str, Any] = {name: (1, name, {}, {}) for name in TRAININGS}
    watchful = {"model": {"entrypoint": "tests.unit.trainer.meta_code:watchful", "metaDevice": True}}
    watched = {"watched": (2, "tied", {SHARD: 2}, watchful), "watched, whole": (1, "tied", {}, watchful)}
    return run_layouts(tmp_path_factory, TRAININGS, {**alone, **watched, **LAYOUTS})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_from_the_same_parameters(results: dict[str, dict[str, Any]], layout: str) -> None:
    expected, found = results[LAYOUTS[layout][1]], results[layout]
    assert found["errors"] == [None]
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        # A key's bias moves by rounding alone: it is added to all scores alike.
        assert torch.allclose(found["parameters"][name], value, rtol=TOLERANCE, atol=1e-13), name
    require_same_figures(found, expected, [LOSS], tolerance=TOLERANCE)


class Net(nn.Module):
    """Two layers, a tied weight, a buffer."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.forgets = forgets

    def initialise_layer(self, layer: nn.Module) -> None:
        if self.forgets == "weight" and layer is self.second:
            nn.init.zeros_(layer.weight)
        elif self.forgets == "buffer" and layer is self.norm:
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif self.forgets == "integers" and layer is self.norm:
            for value in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                nn.init.ones_(value)
        elif isinstance(layer, nn.Linear | nn.BatchNorm1d):
            layer.reset_parameters()


def test_values_are_those_of_the_model_and_of_the_seed() -> None:
    nets = [build_on_meta(Net) for _ in range(2)]
    assert all(parameter.is_meta for parameter in nets[0].parameters())
    for net in nets:
        materialise(net, torch.device("cpu"), seed=3)
    one, other = nets
    assert one.second.weight is one.first.weight
    assert torch.equal(one.first.weight, other.first.weight)
    assert one.first.weight.abs().min() > 0
    assert torch.equal(one.norm.running_var, torch.ones(4))
    assert int(one.norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("forgets", "named"),
    [
        ("weight", "`second.bias` of a Linear"),
        ("buffer", "`norm.running_"),
        ("integers", "`norm.num_batches_tracked`"),
    ],
)
def test_what_is_left_without_values_is_refused(forgets: str, named: str) -> None:
    net = build_on_meta(lambda: Net(forgets))
    with pytest.raises(InvalidConfiguration, match=f"initialise_layer leaves {named}"):
        materialise(net, torch.device("cpu"), seed=3)


def test_a_buffer_of_the_library_that_it_does_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version would leave it whose layers set theirs in another place."""
    transformers = pytest.importorskip("transformers")
    initialise = transformers.PreTrainedModel._init_weights

    def forgets_rotary_embeddings(owner: Any, layer: nn.Module) -> None:
        if "Rotary" not in type(layer).__name__:
            initialise(owner, layer)

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", forgets_rotary_embeddings)
    with pytest.raises(
        InvalidConfiguration, match=r"leaves `model\.layers\.0\.self_attn\.rotary_emb\.\w*inv_freq` of a Ll"
    ):
        materialise(build_on_meta(lambda: double_transformers("llama")), torch.device("cpu"), seed=3)


def test_a_model_that_cannot_be_initialised_by_layers_is_refused(tmp_path: Path) -> None:
    (rank,) = run_ranks(tmp_path, job(small(model={**user("double_mlp"), "metaDevice": True})))
    assert rank.code == ExitCode.INVALID_CONFIGURATION
    assert "`training.model.metaDevice`: the model Sequential has no method `initialise_layer(layer)`" in rank.err


def test_no_rank_ever_holds_more_than_its_part_and_a_layer(results: dict[str, dict[str, Any]]) -> None:
    """The model itself ends its rank otherwise."""
    assert results["watched"]["errors"] == [None]
    (error,) = results["watched, whole"]["errors"]
    assert error.endswith("is held whole")
