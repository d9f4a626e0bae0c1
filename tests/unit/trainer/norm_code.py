"""A user's models with batch normalisation, and a rank that calls the layer by itself."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from disttrain_api.builtin import ResnetConfig
from disttrain_trainer.models.resnet import model as resnet
from disttrain_trainer.parallel.sync_batch_norm import synchronise_batch_norm
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import join_world
from tests.unit.trainer.cases import config_of
from tests.unit.trainer.worlds import small

LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d of sequences": (lambda: nn.BatchNorm1d(3, momentum=0.3), (3, 4)),
    "2d": (lambda: nn.BatchNorm2d(2), (2, 3, 3)),
    "3d, plain means": (lambda: nn.BatchNorm3d(2, momentum=None), (2, 2, 2, 1)),
    "not affine": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
}
SIZES = (5, 1, 2)
"""Batch of each rank: also one on which a rank alone could not be normalised."""
STEPS = 3


def double_resnet(norm: str = "Batch") -> nn.Module:
    """Images 1 x 8 x 8 -> 5 classes in float64."""
    return resnet.build(ResnetConfig(width=8, blocks=[1, 1], input_channels=1, output_size=5, norm=norm)).double()


def double_images(size: int = 50) -> tuple[Dataset, Dataset]:
    """50 images: with a global batch of 24 the last batch of an epoch holds 2."""
    generator = torch.Generator().manual_seed(7)
    inputs = 3 + 2 * torch.randn(size + 11, 1, 8, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (size + 11,), generator=generator)
    return TensorDataset(inputs[:size], targets[:size]), TensorDataset(inputs[size:], targets[size:])


def images() -> tuple[Dataset, Dataset]:
    """The same in float32."""
    training, held_out = (TensorDataset(one.tensors[0].float(), one.tensors[1]) for one in double_images())
    return training, held_out


def layer_of(name: str) -> nn.Module:
    """The layer in float64, its parameters not what they are at the start."""
    layer = LAYERS[name][0]().double()
    for index, parameter in enumerate(layer.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    return nn.Sequential(layer)


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and gradients of the outputs, of all ranks."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, sum(SIZES), *LAYERS[name][1])
    inputs, gradients = 100 + torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, gradients


def run_layer(model: nn.Module, name: str, rank: int | None) -> dict[str, Tensor]:
    """What the layer computes on a rank's part of the batches; None: on the whole."""
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        inputs, gradients = batch(name, step)
        if rank is not None:
            inputs, gradients = inputs.split(SIZES)[rank], gradients.split(SIZES)[rank]
        inputs = inputs.clone().requires_grad_()
        outputs = model(inputs)
        outputs.backward(gradients)
        found |= {f"outputs {step}": outputs.detach(), f"input gradient {step}": inputs.grad}
    found |= {f"gradient of {key}": value.grad for key, value in model.named_parameters()}
    found |= {f"state {key}": value.clone() for key, value in model.state_dict().items() if "running" in key}
    return found | {"state batches": model.state_dict().get("0.num_batches_tracked", torch.tensor(0))}


def main() -> None:
    folder = Path(os.environ["RESULTS"])
    config = config_of(folder, {"training": small()}, 1)
    world = join_world(config, find_device(0, config.world_size, threads_given=True))
    results = {name: run_layer(synchronise_batch_norm(layer_of(name), world), name, world.rank) for name in LAYERS}
    torch.save(results, folder / f"{world.rank}.pt")
    world.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
