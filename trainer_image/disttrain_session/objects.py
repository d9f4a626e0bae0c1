"""A script's objects in the checkpoints of a session.

Models and optimizers that all ranks have together lie in torch's format, each rank writing its part. All else (figures
of chance, positions in the data, a scheduler, an environment) is each rank's own: one tensor of bytes per rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from disttrain_trainer.checkpoint.compatibility import extra_state_in
from disttrain_trainer.checkpoint.kept_extra_state import require_extra_state, room_for_extra_state
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.plain import require_plain

RESERVED = ("optimizers", "ranks")
"""Parts of a checkpoint that are no model's."""


@runtime_checkable
class Stateful(Protocol):
    """Interface of objects that can be registered: `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass
class Objects:
    """A script's registered objects, by name."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    """Alike on all ranks, or cut over them."""
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    """Optimizers of those models' parameters."""
    others: dict[str, Stateful] = field(default_factory=dict)
    """Each rank's own."""

    @classmethod
    def sort(cls, given: Mapping[str, Any], is_shared: "SharedParameters") -> "Objects":
        """Return the objects by kind. Raises ValueError that names one whose state a checkpoint cannot hold."""
        found = cls()
        for name, value in given.items():
            if name in RESERVED:
                raise ValueError(f"{name} is the name of a part of every checkpoint: choose another one")
            if not isinstance(value, Stateful):
                raise ValueError(f"{name} is a {type(value).__name__} without state_dict and load_state_dict")
            if isinstance(value, nn.Module) and is_shared(value.parameters()):
                try:
                    require_extra_state(value)
                except InvalidConfiguration as error:
                    raise ValueError(f"{name}: {error}") from error
                found.models[name] = value
            elif isinstance(value, Optimizer) and is_shared(_parameters(value)):
                found.optimizers[name] = value
            else:
                require_plain(value.state_dict(), f"{name}.state_dict()")
                found.others[name] = value
        return found

    @property
    def names(self) -> list[str]:
        """Return the names of all objects, with their kind, in order."""
        kinds = (("model", self.models), ("optimizer", self.optimizers), ("object", self.others))
        return sorted(f"{kind} {name}" for kind, objects in kinds for name in objects)

    def shared_state(self) -> dict[str, Any]:
        """Return the tensors that ranks have together: by model and parameter; by optimizer, index and kind."""
        tensors = {name: dict(_tensors_of(optimizer, name)) for name, optimizer in self.optimizers.items()}
        models = {name: get_model_state_dict(model) for name, model in self.models.items()}
        return models | _optimizers({name: state for name, state in tensors.items() if state})

    def own_state(self) -> dict[str, Any]:
        """Return the rest: of optimizers all that is no tensor, of other objects all."""
        optimizers = {
            name: {"groups": _groups_of(optimizer), "values": dict(_values_of(optimizer))}
            for name, optimizer in self.optimizers.items()
        }
        others = {name: value.state_dict() for name, value in self.others.items()}
        for name, state in (*others.items(), *optimizers.items()):
            require_plain(state, f"{name}.state_dict()")
        return {"optimizers": optimizers, "others": others}

    def room(self, metadata: Metadata) -> dict[str, Any]:
        """Return tensors for loading to write into: the models' own, and for all else those of the stored size."""
        models = {name: _room_of_model(model, name, metadata) for name, model in self.models.items()}
        optimizers = {name: state for name, one in self.optimizers.items() if (state := _room_of(one, name, metadata))}
        return models | _optimizers(optimizers)

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Give each object its state. Raises what the objects raise."""
        for name, model in self.models.items():
            set_model_state_dict(model, get_model_state_dict(model) | shared[name])
        for name, optimizer in self.optimizers.items():
            _restore(optimizer, shared.get("optimizers", {}).get(name, {}), own["optimizers"][name])
        for name, value in self.others.items():
            value.load_state_dict(own["others"][name])


class SharedParameters:
    """Which parameters the ranks have together: those of prepared models, and all of a lone rank."""

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._known: set[int] = set()

    def add(self, model: nn.Module) -> None:
        """Note a model that was prepared."""
        self._known.update(id(parameter) for parameter in model.parameters())

    def __call__(self, parameters: Iterator[Tensor]) -> bool:
        """Return whether all of these, and at least one, are such parameters."""
        found = [id(parameter) in self._known for parameter in parameters]
        return bool(found) and (self._alone or all(found))


def _room_of_model(model: nn.Module, name: str, metadata: Metadata) -> dict[str, Any]:
    weights = get_model_state_dict(model)
    extra = extra_state_in(weights)
    tensors = {name: value for name, value in weights.items() if name not in extra}
    return tensors | room_for_extra_state(extra, metadata, f"{name}.")


def _optimizers(state: dict[str, Any]) -> dict[str, Any]:
    return {"optimizers": state} if state else {}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def _tensors_of(optimizer: Optimizer, name: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    parameters = list(_parameters(optimizer))
    for index, values in optimizer.state_dict()["state"].items():
        tensors = {kind: value for kind, value in values.items() if isinstance(value, Tensor)}
        for kind, value in tensors.items():
            if isinstance(value, DTensor) and value.shape != parameters[index].shape:
                raise ValueError(f"{name}: `{kind}` is cut over ranks otherwise than its parameter")
        if tensors:
            yield str(index), tensors


def _values_of(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, values in optimizer.state_dict()["state"].items():
        yield index, {kind: value for kind, value in values.items() if not isinstance(value, Tensor)}


def _room_of(optimizer: Optimizer, name: str, metadata: Metadata) -> dict[str, dict[str, Tensor]]:
    parameters, prefix = list(_parameters(optimizer)), f"optimizers.{name}."
    room: dict[str, dict[str, Tensor]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        index, _, kind = key.removeprefix(prefix).partition(".")
        if not (key.startswith(prefix) and isinstance(entry, TensorStorageMetadata) and index.isdecimal()):
            continue
        if int(index) >= len(parameters):
            raise ValueError(f"{name} has {len(parameters)} parameters, and the checkpoint has state of more")
        parameter = parameters[int(index)]
        alike = isinstance(parameter, DTensor) and parameter.shape == entry.size
        dtype = entry.properties.dtype
        empty = torch.empty_like(parameter, dtype=dtype) if alike else torch.empty(entry.size, dtype=dtype)
        room.setdefault(index, {})[kind] = empty.detach()
    return room


def _restore(optimizer: Optimizer, tensors: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    state = {index: {**tensors.get(str(index), {}), **values} for index, values in own["values"].items()}
    # torch puts each value where its parameter lies.
    optimizer.load_state_dict({"state": state, "param_groups": own["groups"]})
