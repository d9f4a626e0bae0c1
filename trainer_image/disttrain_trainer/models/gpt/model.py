"""A decoder-only transformer in GPT-2's shape (Radford et al. 2019; the code follows nanoGPT's).

Shapes: B batch, T tokens, D width, H heads, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from disttrain_api.builtin import GptConfig
from disttrain_trainer.models.gpt.feed_forward import feed_forward, last_layer
from disttrain_trainer.models.gpt.tensor_plan import tensor_plan
from disttrain_trainer.moe.experts import FeedForwardExperts
from disttrain_trainer.moe.layer import MixtureOfExperts
from disttrain_trainer.protocols import ContextPart

_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    context: ContextPart | None = None
    """The part of sequences that is computed; None: whole ones."""
    joined = False
    """Whether queries, keys and values are one product, of weights that are held whole."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        # Three layers, not one: cut over the ranks of a tensor group, each keeps whole heads.
        self.query = nn.Linear(config.width, config.width, bias=config.bias)
        self.key = nn.Linear(config.width, config.width, bias=config.bias)
        self.value = nn.Linear(config.width, config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self._heads, self._projected(x))
        dropout = self.dropout if self.training else 0.0
        if self.context is None:
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = self.context.causal_attention(q, k, v, dropout)
        return self.out(y.transpose(1, 2).flatten(2))

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        layers = (self.query, self.key, self.value)
        # A hook, or another class, makes something else of a layer than the product with its weights.
        if not (self.joined and all(map(_is_plain, layers))):
            return [layer(x) for layer in layers]
        bias = None if self.query.bias is None else torch.cat([layer.bias for layer in layers])
        return functional.linear(x, torch.cat([layer.weight for layer in layers]), bias).chunk(3, dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H * D'] -> [B, H, T, D'], with as many heads as this rank has."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def _is_plain(layer: nn.Module) -> bool:
    """Whether it is nn.Linear as it was made."""
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and not (forward or layer._backward_hooks or layer._backward_pre_hooks)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
        self.feed_forward = feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class Embeddings(nn.Module):
    """Tokens [B, T] -> [B, T, D]: what each is, and where."""

    context: ContextPart | None = None
    """The part of sequences that is computed; None: whole ones."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        assert config.sequence_length is not None
        self.tokens = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, device, part = tokens.shape[1], tokens.device, self.context
        positions = torch.arange(length, device=device) if part is None else part.positions(length, device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class Head(nn.Module):
    """[B, T, D] -> logits [B, T, V]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.logits = nn.Linear(config.width, config.vocabulary_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class Gpt(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        self.has_experts = config.experts is not None
        for layer in self.modules():
            # Not a subclass's own, which is not there yet.
            Gpt.initialise_layer(self, layer)
        if config.tie_weights:
            self.head.logits.weight = self.embeddings.tokens.weight

    def vocabulary_size(self) -> int:
        """Return the number of tokens that the table of embeddings has rows for."""
        return self.embeddings.tokens.num_embeddings

    def initialise_layer(self, layer: nn.Module) -> None:
        """Give values to what the layer holds itself, from torch's random state."""
        if isinstance(layer, nn.LayerNorm | FeedForwardExperts):
            layer.reset_parameters()
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=_STD)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
        for owner, name in self._onto_residual():
            if layer is owner:
                # Each block adds to the residual stream twice; the sum keeps its size (GPT-2, section 2.3).
                nn.init.normal_(layer.get_parameter(name), std=_STD / (2 * len(self.blocks)) ** 0.5)

    def _onto_residual(self) -> Iterator[tuple[nn.Module, str]]:
        """The weights whose products are added to the residual stream."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block.attention.out, "weight"
            yield last_layer(block.feed_forward)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x

    def layers(self) -> list[nn.Module]:
        """The modules whose composition this is."""
        return [self.embeddings, *self.blocks, self.head]

    def output_layers(self) -> list[nn.Module]:
        """The layers from the last hidden states to the logits."""
        return [self.head.logits]

    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        """How the layers are cut over a tensor group (parallel/tensor.py)."""
        return tensor_plan(sequence, vocabulary, experts=self.has_experts)

    def use_context(self, context: ContextPart) -> None:
        """Compute parts of sequences from now on (parallel/context)."""
        for layer in self.modules():
            if isinstance(layer, Embeddings | Attention):
                layer.context = context

    def join_products(self) -> None:
        """Compute each layer's queries, keys and values by one product from now on."""
        for layer in self.modules():
            if isinstance(layer, Attention):
                layer.joined = True

    def flops_per_token(self) -> float:
        """6 N + 12 L H Q T (PaLM, appendix B): forward and backward, of the longest sequences.

        N: parameters that a token is multiplied with, so not those of the tables of embeddings, nor those of experts
        that do not compute it.
        """
        tokens, positions = self.embeddings.tokens, self.embeddings.positions
        tables = [positions] if self.head.logits.weight is tokens.weight else [positions, tokens]
        unused = sum(table.weight.numel() for table in tables) + sum(
            layer.idle_parameters for layer in self._mixtures()
        )
        multiplied = sum(p.numel() for p in self.parameters()) - unused
        return 6 * multiplied + 12 * len(self.blocks) * tokens.embedding_dim * positions.num_embeddings

    def _mixtures(self) -> list[MixtureOfExperts]:
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]


def build(config: GptConfig) -> nn.Module:
    """A Gpt of this shape, initialised from torch's random state."""
    return Gpt(config)
