"""A layer's attention that needs nothing but hidden states: positions, rotary embeddings and mask are its own."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from disttrain_trainer.models.transformers.families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def causal_attention(family: Family, config: PreTrainedConfig, layer: int, window: int | None) -> nn.Module:
    """Return the family's attention of a layer, [B, T, D] -> ([B, T, D], None), with the library's parameter names.

    window: how many tokens each one looks at, the own one included; None: all before it.
    """
    attention = _causal(family.part("Attention"))(config, layer)
    # Between layers passes one tensor, so each has the rotary embeddings for itself; their buffers are not saved.
    attention.rotary_emb = family.part("RotaryEmbedding")(config)
    attention.window = window  # type: ignore[assignment]
    return attention


@cache
def _causal(library: type[nn.Module]) -> type[nn.Module]:
    class CausalAttention(library):  # type: ignore[valid-type, misc]
        """The library's attention; the decoder layer's other arguments are not there."""

        window: int | None = None

        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            rotated = self.rotary_emb(hidden_states, position_ids=positions.unsqueeze(0))
            found: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states=hidden_states,
                position_embeddings=rotated,
                attention_mask=_window_mask(positions, self.window),
            )
            return found

    return CausalAttention


def _window_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """[1, 1, T, T], true where a token is looked at; None: the kernel's own causal mask does."""
    if window is None or len(positions) <= window:
        return None
    distance = positions[:, None] - positions[None, :]
    return ((distance >= 0) & (distance < window))[None, None]
