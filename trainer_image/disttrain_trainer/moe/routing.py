"""Choice of the experts of each token, and the auxiliary losses of the router: functions of tensors.

Shapes: N tokens, E experts, k experts per token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Choice:
    """The experts of each token. A pair of a token and one of its experts is an assignment."""

    experts: Tensor
    """[N, k] of 0..E - 1, the most probable first."""
    gates: Tensor
    """[N, k]: the factor of each expert's output."""
    probabilities: Tensor
    """[N, E]: the router's softmax."""


def choose(logits: Tensor, per_token: int) -> Choice:
    """The k most probable experts of each token. logits: [N, E].

    With one expert the gate is its probability (Switch, Fedus et al. 2021, section 2.1), so that the router learns;
    with more it is the softmax over the chosen ones (Shazeer et al. 2017, section 2.1).
    """
    probabilities = logits.softmax(-1)
    gates, experts = probabilities.topk(per_token, dim=-1)
    if per_token > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return Choice(experts, gates, probabilities)


def assignments_per_expert(experts: Tensor, counted: Tensor, count: int) -> Tensor:
    """[E] whole numbers: how often each expert was chosen. experts: [N, k]; counted: [N], False for padding."""
    chosen = torch.zeros(count, dtype=torch.int64, device=experts.device)
    return chosen.scatter_add(0, experts.flatten(), counted.repeat_interleave(experts.shape[1]).to(torch.int64))


def admit(experts: Tensor, counted: Tensor, count: int, capacity_factor: float | None) -> Tensor:
    """[N, k] of bool: the assignments that are computed. Padding (not `counted`, [N]) never is, and takes no room.

    With a factor c every expert takes the first ceil(c k N' / E) of its assignments in the order of the tokens, where
    N' is the number of tokens that are counted (Switch, section 2.2). Without one none is dropped.
    """
    admitted = counted.unsqueeze(1).expand(experts.shape)
    if capacity_factor is None:
        return admitted
    wanted = functional.one_hot(experts.flatten(), count) * admitted.reshape(-1, 1)
    place = wanted.cumsum(0).gather(1, experts.reshape(-1, 1)).view(experts.shape)
    # In float64, and less a hair: 1.1 x 10 / 11 is one place, not two.
    share = counted.sum().to(torch.float64) * (capacity_factor * experts.shape[1] / count)
    return admitted & (place <= torch.ceil(share - 1e-9))


def by_expert(experts: Tensor, admitted: Tensor) -> Tensor:
    """[n] indices into the flattened [N, k]: the admitted assignments, by expert, each expert's in order of tokens."""
    flat = experts.flatten()
    kept = admitted.flatten().nonzero().squeeze(1)
    return kept[flat[kept].argsort(stable=True)]


def sort_by_expert(experts: Tensor, admitted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The admitted assignments as `by_expert` has them, and how many of them each expert gets, [E]."""
    assignments = by_expert(experts, admitted)
    return assignments, experts.flatten()[assignments].bincount(minlength=count)


def balance_losses(probabilities: Tensor, fractions: Tensor) -> Tensor:
    """[N]: each token's part of the load-balancing loss E sum_e f_e P_e (Switch, section 2.2); 1 where all is even.

    fractions: [E], the part f_e of all assignments that went to each expert, of all ranks and without gradient. The
    mean over the tokens is the loss, since P_e is the mean probability.
    """
    return (probabilities @ fractions.to(probabilities.dtype)) * len(fractions)


def z_losses(logits: Tensor) -> Tensor:
    """[N]: the square of the log of the sum of exponentials of each token (ST-MoE, Zoph et al. 2022, section 3.1)."""
    return logits.logsumexp(-1).square()


def fractions_of(assignments: Tensor) -> Tensor:
    """[E]: each expert's part of all assignments; zero where there are none."""
    total = assignments.sum().clamp(min=1)
    return assignments.to(torch.float64) / total


def imbalance(assignments: Tensor) -> float:
    """Load of the busiest expert over the mean load; 1 where all is even. assignments: [E]."""
    total = float(assignments.sum())
    return float(assignments.max()) * len(assignments) / total if total else math.nan
