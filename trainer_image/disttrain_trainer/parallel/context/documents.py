"""Attention that stays within the documents of a sequence, in each of which positions begin at 0.

On a CPU attention is called for each document, so that nothing is computed between two of them. On a GPU, which would
wait for so many small calls, a mask keeps them apart.
Shapes: B batch, T tokens of a sequence, H heads, D' width of a head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from disttrain_trainer.parallel.context.part import Context
from disttrain_trainer.parallel.context.ring import Ring
from disttrain_trainer.parallel.context.ring_steps import Look
from disttrain_trainer.protocols import ContextPart
from disttrain_trainer.runtime.device import in_host_memory


class Documents(ContextPart):
    """See ContextPart. Documents of the microbatch that is computed."""

    def __init__(self, part: Context | None) -> None:
        """part: of every sequence, which is this rank's; None: all of it."""
        self._part = part
        self.degree = 1 if part is None else part.degree
        self._starts: Tensor | None = None
        self._host_starts: Tensor | None = None
        self._lengths: list[int] = []
        self._steps: list[list[Look]] = []

    def use(self, starts: Tensor | None, host_starts: Tensor | None = None) -> None:
        """Compute a microbatch from now on, forward or backward. starts: [B, T] of whole sequences, where the document
        of each token begins; None: each sequence is one. host_starts: the same in the host's memory, where it is there,
        so that nothing waits for a GPU."""
        self._starts, self._lengths, self._steps = starts, [], []
        self._host_starts = starts if host_starts is None else host_starts

    def stay_out_of_graphs(self, device: torch.device) -> None:
        """Have compiled layers on the device call as it is what looks at the lengths of documents, or sends."""
        masks = self._part is None and not in_host_memory(torch.empty(0, device=device))
        for name in ("attend",) if masks else ("causal_attention", "attend"):
            setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        own = torch.arange(tokens, device=device) if self._part is None else self._part.positions(tokens, device)
        return own if self._starts is None else own - self._starts[:, own]

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor:
        if isinstance(self._part, Ring):
            return self._on_a_ring(self._part, query, key, value, dropout, scale)
        attention = partial(self._causal, dropout=dropout, scale=scale)
        return self._of_sequences(query, key, value, attention)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        return self._of_sequences(query, key, value, partial(self._one_by_one, attention=attention))

    def _of_sequences(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        if self._part is None:
            return attention(query, key, value)
        return self._part.attend(query, key, value, attention)

    def _on_a_ring(
        self, ring: Ring, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None
    ) -> Tensor:
        if self._host_starts is None or isinstance(query, FakeTensor):
            return ring.causal_attention(query, key, value, dropout, scale)
        self._steps = self._steps or ring.steps_of_documents(self._host_starts)
        return ring.causal_steps(query, key, value, self._steps, dropout, scale)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        if self._starts is None or (in_host_memory(query) and not isinstance(query, FakeTensor)):
            attention = partial(
                functional.scaled_dot_product_attention,
                dropout_p=dropout,
                is_causal=True,
                scale=scale,
                enable_gqa=groups > 1,
            )
            return self._one_by_one(query, key, value, attention)
        if groups > 1:
            # With a mask, kernels without score matrices take as many heads of keys as of queries.
            key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        mask = (self._starts.unsqueeze(2) == self._starts.unsqueeze(1)).tril().unsqueeze(1)
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """Return `attention(query, key, value)` of each document."""
        batch, tokens = query.shape[0], query.shape[2]
        lengths = self._lengths_of_documents()
        if len(lengths) <= batch:
            return attention(query, key, value)
        # [B, H, T, D'] to [1, H, length, D'] each.
        rows = [one.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(lengths, 2) for one in (query, key, value)]
        found = torch.cat([attention(*document) for document in zip(*rows, strict=True)], 2)
        return found.squeeze(0).unflatten(1, (batch, tokens)).transpose(0, 1)

    def _lengths_of_documents(self) -> list[int]:
        """Those of all sequences, in order; none where each sequence is one."""
        starts = self._host_starts
        if starts is not None and not self._lengths:
            places = torch.arange(starts.shape[1], device=starts.device)
            first = (starts == places).flatten().nonzero().flatten()
            self._lengths = first.diff(append=first.new_tensor([starts.numel()])).tolist()
        return self._lengths
