"""The optimizer's state in a checkpoint: what no step has used begins anew, what is there in part is refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from disttrain_trainer.checkpoint import kept_optimizer
from disttrain_trainer.checkpoint.kept_optimizer import restore_optimizer, room_for_optimizer, saved_optimizer
from disttrain_trainer.runtime.errors import CheckpointMismatch

PLACE = Path("storage/step-7")
ADAM = "AdamW"


class Nested(torch.optim.SGD):
    """Keeps dictionaries, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    past = self.state[parameter].setdefault("past", {"sum": torch.zeros_like(parameter), "steps": 0})
                    past["sum"] += parameter.grad
                    past["steps"] += 1


def a_state(optimizer: str, used: str = "", steps: int = 0, **settings: Any) -> Any:
    """Three layers, of which the steps use those that are named."""
    torch.manual_seed(1)
    module = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("first", "branch", "pooler")})
    kind = Nested if optimizer == "Nested" else getattr(torch.optim, optimizer)
    state = SimpleNamespace(module=module, optimizer=kind(module.parameters(), lr=0.1, **settings))
    for step in range(steps):
        a_step(state, used, step)
    return state


def a_step(state: Any, used: str, step: int) -> None:
    inputs = torch.arange(3.0) + step
    sum(state.module[name](inputs).sum() for name in used.split()).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def names_in(saved: Any) -> dict[str, Any]:
    """What a checkpoint says that it holds."""
    flat, _ = flatten_state_dict(saved)
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in flat.items()}


def go_on(state: Any, saved: Any) -> dict[str, Any]:
    """Load what was saved, as torch.distributed.checkpoint does: by its flat names. Returns the room for it."""
    room = room_for_optimizer(state, names_in(saved), PLACE)
    for name, (parameter, *above, last) in flatten_state_dict(room)[1].items():
        inner: Any = room[parameter]
        for key in above:
            inner = inner[key]
        inner[last] = flatten_state_dict(saved)[0][name]
    restore_optimizer(state, room)
    return room


@pytest.mark.parametrize(
    ("optimizer", "settings"), [(ADAM, {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("Nested", {})]
)
def test_layers_that_no_step_has_used_go_on_as_if_nothing_had_been(optimizer: str, settings: dict[str, Any]) -> None:
    through = a_state(optimizer, "first branch", steps=2, **settings)
    resumed = a_state(optimizer, **settings)
    saved = deepcopy(saved_optimizer(through))
    room = go_on(resumed, saved)
    resumed.module.load_state_dict(through.module.state_dict())
    assert room.keys() == saved.keys()
    for state in (through, resumed):
        a_step(state, "first pooler", step=2)
    for name, value in through.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], value), name
    assert names_in(saved_optimizer(resumed)) == names_in(saved_optimizer(through))


def test_what_has_made_no_step_saves_nothing_and_stays_as_it_is() -> None:
    """As where FP16 has passed over all steps so far: their gradients were not finite."""
    state = a_state(ADAM)
    assert saved_optimizer(state) == {}
    assert not state.optimizer.state
    assert go_on(a_state(ADAM), {}) == {}


@pytest.mark.parametrize(
    ("written", "here", "lacks"),
    [
        (("SGD", {"momentum": 0.9}), ADAM, "step"),
        ((ADAM, {}), "NAdam", "mu_product"),
        (("Nested", {}), ADAM, "step"),
        ((ADAM, {}), "Nested", "past.sum"),
    ],
)
def test_some_of_a_parameters_state_without_the_rest_is_of_another_optimizer(written, here, lacks):
    saved = saved_optimizer(a_state(written[0], "first", 1, **written[1]))
    with pytest.raises(CheckpointMismatch) as raised:
        room_for_optimizer(a_state(here), names_in(saved), PLACE)
    assert str(raised.value).startswith(
        f"{PLACE} was written with another optimizer: it has no `{lacks}` of parameter `first.weight`; use"
    )


@pytest.mark.parametrize(
    ("used", "line"),
    [
        ("first branch pooler", ""),
        (
            "first branch",
            "step-7 holds no state of the optimizer for pooler.bias, pooler.weight, which no step had used",
        ),
        ("branch", "for first.bias, first.weight, pooler.bias and 1 more, which no step had used: it begins anew\n"),
    ],
)
def test_the_log_names_what_begins_anew(capsys: pytest.CaptureFixture[str], used: str, line: str) -> None:
    state, saved = a_state(ADAM), saved_optimizer(a_state(ADAM, used, 1))
    room = room_for_optimizer(state, names_in(saved), PLACE)
    world: Any = SimpleNamespace(mesh=SimpleNamespace(pipeline=1), first=True)
    kept_optimizer.log_fresh_parameters(state, room, PLACE, world)
    found = capsys.readouterr().out
    assert line in found if line else found == ""
