"""A rank that compares the bare loop's gradients with the trainer's, of one microbatch with experts spread out.

Rank 0 prints a line `parameters N` where all of its N gradients agree.
"""

import os

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks import bare_experts
from benchmarks.bare_loop import mean_loss, wrap
from disttrain_trainer.build import build_state
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import join_world
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.step import accumulate_gradients, load_step
from disttrain_trainer.tasks.supervised import build_model


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """This rank's part of each."""
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name.replace(".experts.", ".")] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found


def main() -> None:
    config = read_config()
    world = join_world(config, find_device(config.local_rank, config.local_world_size, threads_given=True))
    state = build_state(config, world)
    batches = load_step(state, world, state.cursor)
    weight = sum(batch.weight for batch in batches)
    samples = sum(batch.samples for batch in batches)
    accumulate_gradients(state, batches, weight * world.replicas, samples * world.replicas, world.replicas)

    seed_everything(config.training.seed)
    model = wrap(build_model(config.training), config.job, world.size)
    assert len(bare_experts.experts_of(model)) == 2
    (batch,) = batches
    bare_experts.backward(model, mean_loss(model(batch.inputs), batch.targets))

    expected, found = gradients(state.module), gradients(model)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert gradient.norm() > 0, name
        assert error < 1e-5, (name, float(error))
    if world.first:
        print("parameters", len(expected), flush=True)
    world.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
