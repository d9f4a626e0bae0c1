"""What is computed anew in the backward pass counts once."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from disttrain_api.compute import ActivationCheckpointing
from disttrain_trainer.parallel.activations import recompute


def normalised(momentum):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.BatchNorm1d(4))
    untracked = nn.BatchNorm1d(4, track_running_stats=False)
    return nn.Sequential(block, untracked, nn.Linear(4, 2)).double()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("what", [ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE])
def test_running_statistics_are_those_of_a_model_that_keeps_all(what, momentum, compiled):
    kept = normalised(momentum)
    anew = deepcopy(kept)
    recompute(list(anew), what)
    for layer in anew if compiled else ():
        layer.compile()
    for number in range(3):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        for model in (kept, anew):
            model(inputs).square().sum().backward()
    assert kept[0][1].num_batches_tracked == 3
    for model in (kept, anew):
        model.eval()
    assert anew[0][1].momentum == momentum
    for name, value in kept.state_dict().items():
        torch.testing.assert_close(anew.state_dict()[name], value, rtol=1e-12, atol=0, msg=name)
    for name, parameter in kept.named_parameters():
        torch.testing.assert_close(anew.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-14, msg=name)


class Block(nn.Module):
    """A layer of a user's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


@pytest.mark.parametrize("what", ActivationCheckpointing)
def test_layers_whose_activations_are_computed_anew_are_compiled(what):
    torch._dynamo.reset()
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layers = [Block(), Block()]
    recompute(layers, what)
    for layer in layers:
        layer.compile(backend=note)
        layer(torch.ones(2, 4)).sum().backward()
    assert graphs
    assert all(parameter.grad is not None for layer in layers for parameter in layer.parameters())
