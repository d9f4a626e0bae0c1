"""The average of parameters: its definition to the last bit, evaluated, resumed and exported, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from disttrain.export import export
from disttrain_trainer.checkpoint.export import StoredModel
from disttrain_trainer.ema import ENTRYPOINT, Ema
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, require_same, series
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.user_code import double_mlp, double_samples
from tests.unit.trainer.worlds import run_cases, small, user

DECAY = 0.7
REGULAR = {"evaluation": {"interval": 3}, "checkpoint": {"interval": 3}, "logging": {"interval": 1}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "fsdp2": {SHARD: 2},
    "fsdp2, by units": {SHARD: 2},
    "fsdp2, FP32": {SHARD: 2},
    "tp2": {TENSOR: 2},
    "pp2": {PIPELINE: 2},
}
GPT = {"model": user("double_gpt"), "data": user("double_tokens")}
SINGLE = {"model": user("double_gpt", double=False), "data": user("double_tokens")}
MODELS: dict[str, dict[str, Any]] = {"fsdp2, by units": GPT, "tp2": GPT, "pp2": GPT, "fsdp2, FP32": SINGLE}
RESUMED = ("dp2", "fsdp2", "pp2")


def averaged(folder: Path, evaluate: bool = True, **changes: Any) -> dict[str, Any]:
    ema = {"entrypoint": ENTRYPOINT, "config": {"decay": DECAY, "evaluate": evaluate}}
    kept = {"entrypoint": "tests.unit.trainer.callback_code:Parameters", "config": {"folder": str(folder)}}
    return small(callbacks=[ema, kept], **REGULAR, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def results(folder: Path, world: Path, asked_for: Any) -> dict[str, dict[str, Any]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for name, layout in LAYOUTS.items():
        if name not in asked_for("test_ema", "name"):
            continue
        model = MODELS.get(name, {})
        cases[name] = [{"training": averaged(folder / name, **model), "parallelism": layout}]
        cases[f"{name}, without"] = [{"training": small(**REGULAR, **model), "parallelism": layout}]
    for name in RESUMED:
        training = averaged(folder / f"{name}, resumed", **MODELS.get(name, {}))
        run = {"training": training, "parallelism": LAYOUTS[name]}
        cases[f"{name}, resumed"] = [{**run, "stop_after": 4}, run]
    cases["not evaluated"] = [{"training": averaged(folder / "not evaluated", evaluate=False)}]
    training = averaged(folder / "other model", model=user("double_mlp", hidden=16))
    first = {**training, "callbacks": training["callbacks"][:1], "steps": 3}
    cases["begun late"] = [{"training": small(**REGULAR), "stop_after": 3}, {"training": training}]
    cases["local sgd"] = [{"training": first, "parallelism": {"dataParallel": {"mode": "LocalSGD"}}}]
    return run_cases(world, 2, cases)


def defined(folder: Path, first: int = 0) -> dict[str, Tensor]:
    """The average after six steps, from the parameters of each."""
    average: dict[str, Tensor] = torch.load(folder / f"{first}.pt", weights_only=True)
    for step in range(first + 1, 7):
        for name, parameter in torch.load(folder / f"{step}.pt", weights_only=True).items():
            average[name] = DECAY * average[name] + (1 - DECAY) * parameter
    return average


def exported(path: Path) -> dict[str, Tensor]:
    stored = StoredModel(path, averaged=True)
    return {name: stored.read(name) for name in stored.names}


def evaluations(result: dict[str, Any]) -> list[float]:
    return series(result, HELD_OUT_LOSS)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "pp2"])
def test_the_average_in_a_checkpoint_is_its_definition_to_the_last_bit(results, folder, world, name):
    assert results[name]["errors"] == [None]
    expected, found = defined(folder / name), exported(world / name / "test")
    assert expected.keys() <= found.keys()
    for parameter, value in expected.items():
        assert torch.equal(found[parameter], value), parameter
    assert not torch.equal(found[parameter], results[name]["parameters"][parameter])


def test_stages_keep_the_averages_of_their_layers(results: dict[str, dict[str, Any]], world: Path) -> None:
    found, expected = (exported(world / name / "test") for name in ("pp2", "fsdp2, by units"))
    require_same(found, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_goes_on_with_its_own_parameters(results: dict[str, dict[str, Any]], name: str) -> None:
    require_same(results[name]["parameters"], results[f"{name}, without"]["parameters"], 0.0)
    assert evaluations(results[name]) != evaluations(results[f"{name}, without"])


@pytest.mark.parametrize("name", ["dp2", "fsdp2"])
def test_the_average_is_what_is_evaluated(results: dict[str, dict[str, Any]], folder: Path, name: str) -> None:
    model = double_mlp().requires_grad_(False)
    model.load_state_dict(defined(folder / name))
    inputs, targets = double_samples()[1].tensors  # type: ignore[attr-defined]
    loss = float(functional.cross_entropy(model(inputs), targets))
    assert evaluations(results[name])[-1] == pytest.approx(loss, rel=1e-12)


def test_where_it_is_not_asked_for_the_model_is_evaluated(results: dict[str, dict[str, Any]]) -> None:
    assert evaluations(results["not evaluated"]) == evaluations(results["dp2, without"])


@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_average_goes_on_to_the_last_bit(results: dict[str, dict[str, Any]], world: Path, name: str) -> None:
    assert results[f"{name}, resumed"]["errors"][1] is None
    require_same(exported(world / f"{name}, resumed" / "test"), exported(world / name / "test"), 0.0)
    assert evaluations(results[f"{name}, resumed"]) == evaluations(results[name])


def test_an_average_begins_with_the_weights_of_a_checkpoint_that_has_none(results, folder, world):
    assert results["begun late"]["errors"][1] is None
    require_same(exported(world / "begun late" / "test"), defined(folder / "other model", first=3), 0.0)


def test_replicas_that_train_alone_have_no_average(results: dict[str, dict[str, Any]]) -> None:
    (error,) = results["local sgd"]["errors"]
    assert error.startswith(f"InvalidConfiguration: {ENTRYPOINT} averages the model that all replicas have after each")


def test_a_checkpoint_without_averages_exports_none(results: dict[str, dict[str, Any]], world: Path) -> None:
    assert results["dp2, without"]["errors"] == [None]
    with pytest.raises(InvalidConfiguration, match="holds no averages of parameters: train with"):
        StoredModel(world / "dp2, without" / "test", averaged=True)


def test_the_command_exports_the_average_as_weights_to_begin_with(results, world, tmp_path):
    assert export(world / "fsdp2" / "test", tmp_path / "averaged.safetensors", averaged=True) == 0
    with safe_open(tmp_path / "averaged.safetensors", framework="pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    require_same(written, exported(world / "fsdp2" / "test"), 0.0)
    assert written.keys() == results["fsdp2"]["parameters"].keys()


@pytest.mark.parametrize("decay", [1, -0.1, True, "0.9"])
def test_a_decay_that_is_none_is_refused(decay: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"`decay` is .*, expected a number from 0 to below 1"):
        Ema(decay)


def test_averages_of_other_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is averaged there alone"):
        Ema(0.5).load_state_dict({"average": {"0.weight": torch.zeros(1)}})
