"""A layer's attention that needs nothing but hidden states: positions, rotary embeddings and mask are its own."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from disttrain_trainer.models.transformers.families import Family
from disttrain_trainer.protocols import ContextPart

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_IN_PARTS = "disttrain_context"


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
        context: ContextPart | None = None
        """The part of sequences that is computed; None: whole ones."""

        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
            length, device, part = hidden_states.shape[1], hidden_states.device, self.context
            positions = torch.arange(length if part is None else length * part.degree, device=device)
            own = positions if part is None else part.positions(length, device)
            rotated = self.rotary_emb(hidden_states, position_ids=torch.atleast_2d(own))
            found: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states=hidden_states,
                position_embeddings=rotated,
                attention_mask=_window_mask(positions, self.window),
            )
            return found

    return CausalAttention


def attend_in_parts(config: PreTrainedConfig) -> None:
    """Make the library's layers of this config ask their `context` for attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(_IN_PARTS, _attend)
    config._attn_implementation = _IN_PARTS


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The library's own attention with one of torch's kernels, of parts of sequences: [B, H, T, D'] -> [B, T, H, D'].

    attention_mask: of whole sequences, by the distance of two tokens alone; None: causal.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    part: ContextPart = module.context
    if attention_mask is None:
        found = part.causal_attention(query, key, value, options.get("dropout", 0.0), options.get("scaling"))
        return found.transpose(1, 2), None

    def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
        length = query.shape[2]
        # A document has the mask of a sequence that begins with it.
        own = attention_mask[..., :length, :length]
        found: Tensor = sdpa_attention_forward(grouped, query, key, value, own, **options)[0]  # type: ignore[arg-type]
        return found.transpose(1, 2)

    return part.attend(query, key, value, whole).transpose(1, 2), None


def _window_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """[1, 1, T, T], true where a token is looked at; None: the kernel's own causal mask does."""
    if window is None or len(positions) <= window:
        return None
    distance = positions[:, None] - positions[None, :]
    return ((distance >= 0) & (distance < window))[None, None]
