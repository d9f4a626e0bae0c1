"""Conversion between the shards of a group's ranks and the whole parameters of the servers.

Servers know flattened whole parameters. A rank's piece of one that is cut (tensor parallelism, shards) is a strided
part of that, and a rank of a pipeline has some parameters only. So the group's first rank puts gradients together
before they are pushed, and gives every rank the whole parameters that it has a piece of after they were pulled: one
push and one pull per group, and servers know nothing of layouts. It does so in the host's memory, from where messages
leave, and where a model fits that fits no GPU. Ranks that pushed their own pieces would need strides in every message
and a rule who pushes what several ranks hold; within a pod whole parameters are cheap to move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from disttrain_trainer.parallel.average import buckets
from disttrain_trainer.parallel.meta import cut
from disttrain_trainer.parallel.sharded import reshard
from disttrain_trainer.runtime import json_collectives
from disttrain_trainer.runtime.json_collectives import Form, form_of
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

Key = tuple[str, str]
"""Name of a parameter, and of one of its optimizer's tensors; "" for its own numbers."""
_Header = list[tuple[Key, Form]]
States = Mapping[str, Mapping[str, Tensor]]
"""Tensors of the optimizer by name of the parameter and of the tensor."""


class FullParameters:
    """The trained parameters of a group. All methods are collective calls of the group."""

    def __init__(self, world: World, state: State) -> None:
        """`world`: of the group. `state`: what this rank trains."""
        self._world = world
        self._modules = [state.model] if state.pipeline is None else list(state.pipeline.stages.values())
        named = trained(state)
        self._own = {name: named[name] for name in sorted(named)}
        held = world.gather({name: form_of(value) for name, value in self._own.items()}, dict[str, Form])
        self._holders: dict[str, list[int]] = {}
        for rank, names in enumerate(held):
            for name in names:
                self._holders.setdefault(name, []).append(rank)
        is_cut = world.mesh.pipeline > 1 or any(isinstance(value, DTensor) for value in named.values())
        self._copies = not any(world.gather(is_cut, bool))
        """Whether every rank holds everything."""
        self.whole: Mapping[str, nn.Parameter] = self._own
        """What servers hold, by name: on the first rank, in the host's memory where ranks hold pieces; else unused."""
        if not self._copies and world.first:
            shapes = {name: shape for names in held for name, shape in names.items()}
            self.whole = {
                name: nn.Parameter(torch.empty(shape, dtype=dtype)) for name, (shape, dtype) in shapes.items()
            }

    def gather_gradients(self) -> None:
        """Gradients of what the ranks hold become those of the whole parameters on the first rank."""
        if self._copies:
            return
        found = self._gather({(name, ""): value.grad for name, value in self._own.items() if value.grad is not None})
        for name, parameter in self.whole.items() if self._world.first else ():
            parameter.grad = found.get((name, ""))

    def drop_gradients(self) -> None:
        """Let go of what `gather_gradients` has put together, before as much is put together again."""
        for parameter in () if self._copies else self.whole.values():
            parameter.grad = None

    def gather(self, states: States) -> States:
        """Likewise parameters and the optimizer's tensors; on the first rank the states of whole parameters."""
        if self._copies:
            return states
        tensors = {(name, ""): value.detach() for name, value in self._own.items()}
        tensors |= {(name, kind): value for name, entries in states.items() for kind, value in entries.items()}
        found = self._gather(tensors)
        whole: dict[str, dict[str, Tensor]] = {}
        for (name, kind), value in found.items():
            if kind:
                whole.setdefault(name, {})[kind] = value
            else:
                self.whole[name].data.copy_(value)
        return whole

    @torch.no_grad()
    def spread(self) -> None:
        """The whole parameters of the first rank become those of every rank."""
        self._reshard()
        if self._copies:
            for bucket in buckets([value.detach() for value in self._own.values()]):
                flat = torch.cat([value.flatten() for value in bucket])
                dist.broadcast(flat, src=0)
                for value, part in zip(bucket, flat.split([value.numel() for value in bucket]), strict=True):
                    value.copy_(part.view_as(value))
            return
        values = {(name, ""): value.detach() for name, value in self.whole.items()} if self._world.first else {}
        for (name, _), whole in self._spread(values):
            local_part(self._own[name].detach()).copy_(local_part(cut(whole, self._own[name].detach())))

    def spread_states(self, states: States) -> States:
        """Each rank's part of what the first rank has of the optimizer, cut as the parameters are."""
        self._reshard()
        found: dict[str, dict[str, Tensor]] = {}
        flat = {(name, kind): value for name, entries in states.items() for kind, value in entries.items()}
        for (name, kind), whole in self._spread(flat):
            # Numbers for a whole parameter, Adam's count of steps, are nobody's to cut.
            found.setdefault(name, {})[kind] = cut(whole, self._own[name].detach()) if whole.dim() else whole
        return found

    def _gather(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """On the first rank all tensors of all ranks, whole and in the host's memory; elsewhere empty."""
        own = {}
        for key, value in tensors.items():
            sender = self._holders[key[0]][0]
            # Who holds pieces of the same parameter is at the same place of the pipeline.
            if self._place(sender) == self._place(self._world.rank):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if sender == self._world.rank:
                    own[key] = whole.detach().cpu().contiguous()
        if not self._world.first:
            if self._sends:
                _send(own, 0)
            return {}
        for sender in sorted({ranks[0] for ranks in self._holders.values()} - {0}):
            own |= _receive(sender)
        return own

    def _spread(self, tensors: Mapping[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
        """On every rank those of the first rank's tensors whose parameter it holds."""
        if not self._world.first:
            yield from _receive(0).items()
            return
        for rank in range(1, self._world.size):
            _send({key: value for key, value in tensors.items() if rank in self._holders[key[0]]}, rank)
        yield from ((key, value) for key, value in tensors.items() if 0 in self._holders[key[0]])

    def _reshard(self) -> None:
        for module in self._modules:
            reshard(module)

    @property
    def _sends(self) -> bool:
        return any(ranks[0] == self._world.rank for ranks in self._holders.values())

    def _place(self, rank: int) -> int:
        return self._world.mesh.coordinates(rank)["pipeline"]


def trained(state: State) -> dict[str, nn.Parameter]:
    """The parameters that are trained and that this rank holds, or a piece of, by name."""
    return {name: value for name, value in state.module.named_parameters() if value.requires_grad}


def _send(tensors: Mapping[Key, Tensor], rank: int) -> None:
    """Send tensors in the host's memory."""
    json_collectives.send([(key, form_of(value)) for key, value in tensors.items()], _Header, rank)
    for value in tensors.values():
        dist.send(value.contiguous(), rank)


def _receive(rank: int) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for key, (shape, dtype) in json_collectives.receive(_Header, rank):
        found[key] = torch.empty(shape, dtype=dtype)
        dist.recv(found[key], rank)
    return found
