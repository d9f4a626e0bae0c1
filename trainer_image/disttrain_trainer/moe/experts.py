"""Experts: networks of one shape whose weights are stacked, so that each parameter has a row per expert.

Shapes: E experts of this rank, n assignments, D width, F hidden width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.runtime.local import local_part

# torch's grouped product wants rows that begin at multiples of this.
_ALIGNMENT_BYTES = 16


class FeedForwardExperts(nn.Module):
    """`count` feed-forward networks with GELU between two layers without bias. approximate: see torch.nn.GELU."""

    def __init__(self, count: int, width: int, hidden: int, deviation: float = 0.02, approximate: str = "tanh") -> None:
        super().__init__()
        self.deviation, self.approximate = deviation, approximate
        self.expand = nn.Parameter(torch.empty(count, width, hidden))
        self.contract = nn.Parameter(torch.empty(count, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values from torch's random state."""
        for parameter in (self.expand, self.contract):
            nn.init.normal_(parameter, std=self.deviation)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[n, D] -> [n, D]: the first counts[0] rows are the first expert's, and so on. counts: [E] whole numbers."""
        hidden = functional.gelu(grouped_linear(tokens, self.expand, counts), approximate=self.approximate)
        return grouped_linear(hidden, self.contract, counts)


def grouped_linear(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """[n, A] times each row's own expert's matrix, [E, A, B]: [n, B]. Groups of rows may be empty."""
    weights = own(weights)
    if torch.is_autocast_enabled(tokens.device.type):
        number_format = torch.get_autocast_dtype(tokens.device.type)
        tokens, weights = tokens.to(number_format), weights.to(number_format)
    if _fused(weights):
        return functional.grouped_mm(tokens, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = tokens.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def own(parameter: Tensor) -> Tensor:
    """Return this rank's part of an expert parameter: all of it, or with expert parallelism the rows of its own
    experts."""
    return local_part(parameter)


def _fused(weights: Tensor) -> bool:
    """Whether torch's grouped product takes these matrices; it knows no float64."""
    aligned = all(size * weights.element_size() % _ALIGNMENT_BYTES == 0 for size in weights.shape[1:])
    return weights.dtype in (torch.float32, torch.bfloat16) and aligned
