"""Extra state of modules in a checkpoint: who writes it, the room for it, and what could not come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from disttrain_trainer.checkpoint.compatibility import require_model_fits
from disttrain_trainer.checkpoint.kept_extra_state import (
    log_missing_extra_state,
    of_this_rank,
    require_extra_state,
    room_for_extra_state,
    take_extra_state,
)
from disttrain_trainer.checkpoint.plans import Whole
from disttrain_trainer.parallel.untouched import Untouched
from disttrain_trainer.runtime.errors import CheckpointMismatch, InvalidConfiguration
from tests.unit.trainer.user_layers import Remembering, arrays, remembering

NAMES = ["1._extra_state", "3._extra_state"]


def a_world(rank: int, everyone: list[set[str]] | None = None) -> Any:
    return SimpleNamespace(rank=rank, first=rank == 0, gather=lambda own, kind: everyone)


def stored(**entries: Any) -> Metadata:
    properties = TensorProperties(dtype=torch.uint8)
    return Metadata(
        {
            name.replace("__", "."): BytesStorageMetadata()
            if size is None
            else TensorStorageMetadata(properties, torch.Size(size), [])
            for name, size in entries.items()
        }
    )


def test_tensors_stay_tensors_and_all_else_is_one_value() -> None:
    weights = get_model_state_dict(remembering(["containers", "tensor"]))
    taken = take_extra_state(weights)
    assert list(taken) == NAMES
    assert isinstance(taken[NAMES[0]], Whole)
    assert torch.equal(taken[NAMES[1]], torch.tensor(0.0))
    assert not any("extra" in name for name in weights)
    assert weights


def test_the_first_rank_writes_it_and_in_a_pipeline_the_first_that_computes_it() -> None:
    model = remembering(["number", "number"])
    taken = dict.fromkeys([*NAMES, "_extra_state"], 1)
    assert [of_this_rank(taken, model, None, a_world(rank)) for rank in (0, 1)] == [taken, {}]
    everyone = [{NAMES[0]}, {NAMES[1]}, {NAMES[0]}, {NAMES[1]}]
    for rank, layers in enumerate([model[:2], model[2:], model[:2], model[2:]]):
        written = of_this_rank(taken, model, [nn.Sequential(*layers)], a_world(rank, everyone))
        assert list(written) == ([NAMES[0], "_extra_state"], [NAMES[1]], [], [])[rank]


def test_there_is_room_for_what_is_stored_whatever_is_there_now(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["0.weight", *NAMES, "_extra_state"]
    room = room_for_extra_state(names, stored(model__1___extra_state=[5], model___extra_state=None), "model.")
    assert {name: value if value is None else list(value.shape) for name, value in room.items()} == {
        NAMES[0]: [5],
        "_extra_state": None,
    }
    log_missing_extra_state(names, room, "step-4", a_world(0))
    assert capsys.readouterr().out == "step-4 holds no extra state of 3: it begins anew\n"
    log_missing_extra_state(names[:2], room, "step-4", a_world(0))
    assert capsys.readouterr().out == ""


def test_dictionaries_that_an_earlier_version_took_apart_are_passed_over() -> None:
    there = {"1._extra_state.calls": None, "1._extra_state.pair.0": (3,)}
    require_model_fits(there, {}, NAMES, "step-4", "")  # type: ignore[arg-type]
    with pytest.raises(CheckpointMismatch, match=r"parameter `5\._extra_state\.calls` is unknown here"):
        require_model_fits({"5._extra_state.calls": None}, {}, NAMES, "step-4", "")  # type: ignore[arg-type]


def test_what_could_not_come_back_is_refused() -> None:
    class OneWay(Remembering):
        set_extra_state = nn.Module.set_extra_state

    require_extra_state(remembering(["containers", "bytes in a tensor", "number", "tensor"]))
    with pytest.raises(InvalidConfiguration, match="the model's OneWay has get_extra_state and no set_extra_state"):
        require_extra_state(nn.Sequential(OneWay("number")))
    with pytest.raises(InvalidConfiguration, match=r"of the model's Arrays\['calls'\] is a numpy.ndarray, expected"):
        require_extra_state(arrays())


def test_a_pass_that_does_not_count_leaves_no_trace() -> None:
    model = nn.Sequential(remembering(["containers"]), nn.BatchNorm1d(5)).double()
    before = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in before.items()}
    untouched = Untouched([model])
    model(torch.ones(4, 6, dtype=torch.float64))
    assert model[0][1].calls == [0]
    untouched.put_back()
    assert model[0][1].calls == []
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
