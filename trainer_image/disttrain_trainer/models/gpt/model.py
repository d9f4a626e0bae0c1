"""A decoder-only transformer in GPT-2's shape (Radford et al. 2019; the code follows nanoGPT's).

Shapes: B batch, T tokens, D width, H heads, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from disttrain_api.builtin import GptConfig
from disttrain_trainer.models.gpt.tensor_plan import tensor_plan

_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        # Three layers, not one: cut over the ranks of a tensor group, each keeps whole heads.
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H * D'] -> [B, H, T, D'], with as many heads as this rank has."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class Gpt(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        assert config.sequence_length is not None
        self.tokens = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.apply(_initialise)
        for layer in self._onto_residual():
            nn.init.normal_(layer.weight, std=self._residual_std)
        if config.tie_weights:
            self.head.weight = self.tokens.weight

    def _onto_residual(self) -> list[nn.Module]:
        """Layers whose output is added to the residual stream."""
        return [layer for block in self.blocks for layer in (block.attention.out, block.feed_forward[2])]

    @property
    def _residual_std(self) -> float:
        """Each block adds to the residual stream twice; the sum keeps its size (GPT-2, section 2.3)."""
        return _STD / (2 * len(self.blocks)) ** 0.5

    def initialise_layer(self, layer: nn.Module) -> None:
        """Values for what the layer holds itself (parallel/meta.py)."""
        if isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
        _initialise(layer)
        if any(layer is onto for onto in self._onto_residual()):
            nn.init.normal_(layer.weight, std=self._residual_std)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        """How the layers are cut over a tensor group (parallel/tensor.py)."""
        return tensor_plan(sequence, vocabulary)

    def flops_per_token(self) -> float:
        """6 N + 12 L H Q T (PaLM, appendix B): forward and backward, of the longest sequences.

        N: parameters that a token is multiplied with, so not those of the tables of embeddings.
        """
        tables = [self.positions] if self.head.weight is self.tokens.weight else [self.positions, self.tokens]
        multiplied = sum(p.numel() for p in self.parameters()) - sum(table.weight.numel() for table in tables)
        return 6 * multiplied + 12 * len(self.blocks) * self.tokens.embedding_dim * self.positions.num_embeddings


def build(config: GptConfig) -> nn.Module:
    """A Gpt of this shape, initialised from torch's random state."""
    return Gpt(config)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
