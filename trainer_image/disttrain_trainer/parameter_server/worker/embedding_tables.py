"""Tables: weights of nn.Embedding and nn.EmbeddingBag with sparse=True, whose rows a worker pulls when a batch asks for
them, and of which it pushes the gradients of these rows alone (key-value pulls as in Li et al., OSDI 2014, section 3).

A hook before the module's forward pass sees the indices of the batch. In one task a row is pulled once, so that every
microbatch, and a forward pass that is repeated for recomputation, sees the same numbers.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_trainer.parallel.sparse_gradients import sparse_embeddings
from disttrain_trainer.parameter_server.protocol.rows import Rows, merged
from disttrain_trainer.runtime.device import in_host_memory
from disttrain_trainer.runtime.errors import InvalidConfiguration

PullRows = Callable[[str, Tensor], None]
"""Name of a table and places [n] of rows, ascending: overwrites these with those of the servers."""


def tables_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose weight is a table, by the name of the weight. Raises InvalidConfiguration."""
    found = sparse_embeddings(module)
    holders = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for name, one in found.items():
        others = [other for other in holders if other != name and module.get_parameter(other) is one.weight]
        if others:
            raise InvalidConfiguration(
                f"`training.model`: {name} of an embedding with sparse=True is also {others[0]}, which would need all "
                "of its rows: give the two modules weights of their own, or use sparse=False"
            )
        if one.max_norm is not None:
            raise InvalidConfiguration(
                f"`training.model`: the embedding of {name} has max_norm, which changes rows that lie on servers: "
                "leave it out, or use sparse=False"
            )
    return found


class EmbeddingTables:
    """The tables of a worker's model: which rows it has, and their gradients."""

    def __init__(self, tables: Mapping[str, nn.Module], pull_rows: PullRows) -> None:
        self._weights = {name: module.get_parameter("weight") for name, module in tables.items()}
        self._pull_rows = pull_rows
        self._have = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in self._weights.items()}
        self._whole = False
        for name, module in tables.items():
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def pulled(self, *, whole: bool) -> None:
        """Parameters were pulled anew, all rows or none among them."""
        self._whole = whole
        for have in self._have.values():
            have.zero_()

    def has(self, name: str) -> bool:
        """Whether the parameter is a table."""
        return name in self._weights

    def take_gradients(self) -> dict[str, Rows]:
        """The gradients of the last passes, which the weights do not have any more.

        Raises InvalidConfiguration where a weight was used as a whole.
        """
        found = {}
        for name, weight in self._weights.items():
            gradient, weight.grad = weight.grad, None
            if gradient is None:
                continue
            if not gradient.is_sparse:
                raise InvalidConfiguration(
                    f"`training.model`: {name} of an embedding with sparse=True is also used as a whole, but a worker "
                    "has the rows of its batch alone: use sparse=False"
                )
            found[name] = merged(gradient._indices()[0], gradient._values())
        return found

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        # Compiled code cannot ask servers.
        @torch.compiler.disable
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._whole:
                self._need(name, args[0] if args else kwargs["input"])

        return before

    def _need(self, name: str, indices: Tensor) -> None:
        have = self._have[name]
        places = indices.detach().reshape(-1).to("cpu", torch.int64).unique()
        # What lies outside the table the module itself refuses.
        places = places[(places >= 0) & (places < len(have))]
        missing = places[~have[places]]
        if len(missing):
            self._pull_rows(name, missing)
            have[missing] = True


def let_go(weight: nn.Parameter) -> None:
    """Give the memory of a weight back; it is zeros then, of which a page is held once one of its rows is written to.

    For tables on the CPU; a GPU has no such pages and keeps what it has.
    """
    if in_host_memory(weight) and weight.nbytes:
        # Pages of the system's: an allocator may take them from what was freed before, which it has to fill with zeros.
        empty = mmap.mmap(-1, weight.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        weight.data = torch.frombuffer(empty, dtype=weight.dtype).view(weight.shape)
