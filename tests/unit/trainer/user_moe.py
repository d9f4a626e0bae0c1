"""A user's model with experts of its own."""

import torch
from torch import Tensor, nn

from disttrain_trainer.moe.experts import grouped_linear, own
from disttrain_trainer.moe.layer import MixtureOfExperts


class ShiftedExperts(nn.Module):
    """[n, D] -> [n, D]: each expert a matrix and a shift of its own; `shared`: one shift for all."""

    def __init__(self, count: int, width: int, shared: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(count, width, width, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(*() if shared else (count,), width, dtype=torch.float64))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        shift = own(self.shift).repeat_interleave(counts, dim=0)
        return torch.tanh(grouped_linear(tokens, self.matrix, counts) + shift)


class ExpertTagger(nn.Module):
    """Tokens [B, T] below 16 -> logits [B, T, 16]."""

    def __init__(self, count: int, width: int, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layer = MixtureOfExperts(ShiftedExperts(count, width, shared), count, width, auxiliary_loss_weight=0.5)
        self.head = nn.Linear(width, 16)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        # One long list of tokens, as many models have it.
        return self.head(x + self.layer(x.flatten(0, 1)).view_as(x))


def double_tagger(count: int = 4, width: int = 6, shared: bool = False) -> nn.Module:
    return ExpertTagger(count, width, shared)
