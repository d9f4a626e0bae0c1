"""Expert parallelism as one writes it down without a framework: a layer that each rank has some experts of.

Shapes: N tokens of this rank, E experts of all ranks, k experts per token, D width, F hidden width, R ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, grouped_mm

from disttrain_trainer.moe.experts import FeedForwardExperts
from disttrain_trainer.moe.layer import MixtureOfExperts


class BareExperts(nn.Module):
    """[B, T, D] -> [B, T, D], what `layer` computes: no token is dropped. Rank r has experts r E / R and following."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        assert isinstance(layer.experts, FeedForwardExperts)
        self.router, self.per_token, self.count = layer.router, layer.per_token, layer.count
        self.expand = nn.Parameter(layer.experts.expand.detach().chunk(world)[rank].clone())
        self.contract = nn.Parameter(layer.experts.contract.detach().chunk(world)[rank].clone())
        self._balance_weight, self._z_weight = layer.auxiliary_loss_weight, layer.z_loss_weight
        self.loss = torch.zeros(())
        """From the last forward pass: what the router is to learn beside the model's loss."""

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.flatten(0, -2)
        logits = self.router(tokens)
        probabilities = logits.softmax(-1)
        gates, experts = probabilities.topk(self.per_token)
        gates = gates / gates.sum(-1, keepdim=True)
        counts = experts.flatten().bincount(minlength=self.count)
        self.loss = self._balance_weight * self._balance(probabilities, counts)
        self.loss = self.loss + self._z_weight * logits.logsumexp(-1).square().mean()
        order = experts.flatten().argsort(stable=True)
        token = order // self.per_token
        results = self._exchange(tokens[token], counts.view(dist.get_world_size(), -1))
        weighted = results * gates.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(inputs)

    def _balance(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Load-balancing loss with the load of all ranks."""
        load = counts.clone()
        dist.all_reduce(load)
        return probabilities.mean(0) @ (load / load.sum()) * self.count

    def _exchange(self, rows: Tensor, leaving: Tensor) -> Tensor:
        """What the experts make of rows [N k, D], which are in order of experts; leaving: [R, E / R], how many each."""
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
        expert = torch.arange(leaving.shape[1]).repeat(len(leaving)).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)
        ends = arriving.sum(0).cumsum(0).to(torch.int32)
        hidden = gelu(grouped_mm(arrived[order], self.expand, offs=ends), approximate="tanh")
        results = grouped_mm(hidden, self.contract, offs=ends)[order.argsort()]
        return all_to_all_single_autograd(results, sent, received, dist.group.WORLD)


def experts_of(module: nn.Module) -> list[BareExperts]:
    """All layers with experts."""
    return [layer for layer in module.modules() if isinstance(layer, BareExperts)]


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those of this rank's experts, which no other rank has."""
    return [parameter for layer in experts_of(module) for parameter in (layer.expand, layer.contract)]


def spread(module: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    """A model with layers of experts, in place: these are spread over the ranks, all else is cut by FSDP2."""
    for block in module.blocks:
        block.feed_forward = BareExperts(block.feed_forward)
    own = set(own_parameters(module))
    for layer in module.layers():
        fully_shard(layer, mesh=mesh, ignored_params=own)
    return fully_shard(module, mesh=mesh, ignored_params=own)


def backward(model: nn.Module, loss: Tensor) -> None:
    """Run the backward pass of the model and its layers.

    An expert has had the tokens of all ranks, whose losses are means each.
    """
    (loss + sum(layer.loss for layer in experts_of(model))).backward()
    torch._foreach_div_([parameter.grad for parameter in own_parameters(model)], dist.get_world_size())
