"""The stages that a rank holds, cut out of the whole model.

A rank keeps the module it was given, with all names, but without the parameters and buffers of layers that lie on other
ranks: so checkpoints name everything as the whole model does, and belong to no layout.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn

from disttrain_api.cut_sizes import TIED_IN_SHARDS
from disttrain_trainer.parallel.layers import one_tensor
from disttrain_trainer.runtime.errors import InvalidConfiguration

Around = Callable[[], AbstractContextManager[object]]


class Stage(nn.Module):
    """Layers in turn: [B, ...] -> [B, ...]."""

    def __init__(self, layers: Sequence[nn.Module], around: Sequence[Around] = ()) -> None:
        """`around`: contexts that every forward pass runs in."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._around = tuple(around)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        with ExitStack() as contexts:
            for enter in self._around:
                contexts.enter_context(enter())
            for layer in self.layers:
                x = one_tensor(layer, layer(x))
        return x


class StageBetween(Stage):
    """A Stage on a GPU whose neighbours' messages come and go through the host's memory."""

    def __init__(
        self, layers: Sequence[nn.Module], around: Sequence[Around], device: torch.device, leave: torch.device
    ) -> None:
        """device: where the layers compute; leave: where the outputs are wanted."""
        super().__init__(layers, around)
        self._device, self._leave = device, leave

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self._device)).to(self._leave)


def holders_of(
    stages: Sequence[Sequence[nn.Module]], index_of_stage: Sequence[int]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """The pipeline indices that hold each parameter, in order; several where layers of different ranks share it."""
    holders: dict[nn.Parameter, set[int]] = {}
    for layers, index in zip(stages, index_of_stage, strict=True):
        for layer in layers:
            for parameter in layer.parameters():
                holders.setdefault(parameter, set()).add(index)
    return {parameter: tuple(sorted(found)) for parameter, found in holders.items()}


def drop_others(module: nn.Module, own: Iterable[nn.Module]) -> None:
    """Take the parameters and buffers out of `module` that none of the layers in `own` has."""
    layers = list(own)
    kept = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in kept:
                    tensors[name] = None


def names_of(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def retie(module: nn.Module, names: Mapping[int, list[str]], own: Iterable[nn.Module]) -> None:
    """Give every name of a shared parameter what wrapping put in its place under the name that a stage uses."""
    modules = {id(submodule) for layer in own for submodule in layer.modules()}
    for tied in names.values():
        if len(tied) == 1:
            continue
        places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in tied]
        used = [getattr(owner, attribute) for owner, attribute in places if id(owner) in modules]
        for owner, attribute in places:
            owner._parameters[attribute] = used[0]


def require_apart(holders: Mapping[nn.Parameter, Sequence[int]], stages: Sequence[Sequence[nn.Module]]) -> None:
    """FSDP2 can gather a parameter in one stage of a rank only. Raises InvalidConfiguration."""
    for parameter in holders:
        users = [layers for layers in stages if any(parameter is p for layer in layers for p in layer.parameters())]
        if len(users) > len(holders[parameter]):
            raise InvalidConfiguration(
                f"`parallelism.pipeline.schedule`: {TIED_IN_SHARDS}: untie them (`tieWeights: false`), or use a "
                "schedule of one stage per rank"
            )
