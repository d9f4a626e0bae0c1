"""One process that applies gradients of older weights, as PipeDream and PipeDream-2BW do: what runs are held to.

Nothing here is of the trainer but the order of the samples, the shape of the learning rate and the seeds.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import TensorDataset

from disttrain_api.batch import Batch
from disttrain_api.training import LrSchedule
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.optim.schedules import rate_factor
from disttrain_trainer.runtime.randomness import seed_everything
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.user_code import double_mlp, double_samples, double_tokens

SEED = 0
DEPTH = 3
# Layers of each stage, of seven in all: Linear, Tanh, ..., Linear, or those of a granite of two blocks.
LAYERS = {2: [3, 4], 3: [2, 3, 2], 4: [2, 2, 2, 1]}
Version = Callable[[int, int, int, int], int]
"""(microbatch, stage, stages, microbatches of an update) -> updates behind the weights that it uses there."""


def pipedream(number: int, stage: int, stages: int, per_update: int) -> int:
    """Narayanan et al. 2019, section 3.3: W(t + 1) = W(t) - rate x gradient(W_0(t - p + 1), ..., W_(p-1)(t))."""
    return (number - min(number, stages - 1 - stage)) // per_update


def synced(number: int, stage: int, stages: int, per_update: int) -> int:
    """The same with vertical sync: W(t + 1) = W(t) - rate x gradient(W(t - p + 1))."""
    return (number - min(number, stages - 1)) // per_update


def two_buffers(number: int, stage: int, stages: int, per_update: int) -> int:
    """Narayanan et al. 2021, section 3.1: W(t + 1) = W(t) - rate x gradient(W(t - 1))."""
    step = number // per_update
    return step - min(step, 1)


@dataclass
class Run:
    """What a run computes."""

    parameters: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out_loss: float = 0.0
    skipped: list[int] = field(default_factory=list)


def stages_of_parameters(layers: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """The stage of each parameter of a Sequential, by its name."""
    ends = list(accumulate(layers))
    return {name: next(stage for stage, end in enumerate(ends) if int(name.split(".")[0]) < end) for name in names}


def stages_of_granite(layers: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """The same of embeddings, their scale, two blocks, the norm, the head and the scale of logits."""
    numbers = {"model.embed_tokens": 0, "model.layers.0": 2, "model.layers.1": 3, "model.norm": 4, "lm_head": 5}
    number_of = {name: next(number for part, number in numbers.items() if name.startswith(part)) for name in names}
    numbered = stages_of_parameters(layers, [f"{number}.{name}" for name, number in number_of.items()])
    return {name.split(".", 1)[1]: stage for name, stage in numbered.items()}


@dataclass(frozen=True)
class Task:
    """What is trained, and in which stage a parameter is."""

    model: Callable[[], nn.Module]
    samples: Callable[[], tuple[TensorDataset, TensorDataset]]
    stages: Callable[[Sequence[int], Sequence[str]], dict[str, int]]


def tokens() -> tuple[TensorDataset, TensorDataset]:
    """The sequences of `double_tokens`."""
    training, held_out = (TensorDataset(*map(torch.stack, zip(*part, strict=True))) for part in double_tokens())
    return training, held_out


MLP = Task(lambda: double_mlp(depth=DEPTH), double_samples, stages_of_parameters)
GRANITE = Task(lambda: double_transformers("granite"), tokens, stages_of_granite)


def losses_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample: the mean of its tokens', if it has any."""
    losses = functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return losses.view(len(losses), -1).mean(1)


def simulate(
    version: Version, stages: int, optimizer: Callable[..., torch.optim.Optimizer], steps: int, *, micro: int,
    per_update: int = 1, replicas: int = 1, drained: Collection[int] = (), schedule: dict[str, Any] | None = None,
    task: Task = MLP, is_used: Callable[[list[float], float], bool] = lambda before, loss: True,
) -> Run:  # fmt: skip
    """`drained`: steps after which the pipeline was emptied, so that what follows begins without older weights.

    `is_used`: whether an update is made of a step, by the losses of those before it of which one was, and its own.
    """
    seed_everything(SEED)
    model = task.model()
    stage_of = task.stages(LAYERS[stages], [name for name, _ in model.named_parameters()])
    trained = optimizer(model.parameters())
    peak = trained.param_groups[0]["lr"]
    training, held_out = task.samples()
    batch = Batch(micro=micro, accumulation=per_update, world=micro * per_update * replicas)
    sampler = Sampler(len(training), SEED, batch, replicas)
    cursor, run, filled = Cursor(), Run(dict(model.named_parameters())), 0
    history: list[dict[str, Tensor]] = []
    used_losses: list[float] = []
    for step in range(steps):
        if step in drained or step == 0:
            filled, history = step, []
        history.append({name: value.detach().clone() for name, value in model.named_parameters()})
        microbatches = [
            (at, slots) for replica in range(replicas) for at, slots in enumerate(sampler.microbatches(cursor, replica))
        ]
        weight = sum(float(slots.weights.sum()) for _, slots in microbatches)
        trained.zero_grad()
        loss = 0.0
        for at, slots in microbatches:
            number = (step - filled) * per_update + at
            used = {
                name: history[version(number, stage, stages, per_update)][name].clone().requires_grad_()
                for name, stage in stage_of.items()
            }
            inputs, targets = (tensor[torch.from_numpy(slots.indices)] for tensor in training.tensors)
            losses = losses_of(functional_call(model, used, inputs), targets)
            part = (losses * torch.from_numpy(slots.weights).double()).sum() / weight
            loss += part.item()
            gradients = torch.autograd.grad(part, list(used.values()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        run.losses.append(loss)
        run.norms.append(float(torch.nn.utils.get_total_norm([value.grad for value in model.parameters()])))
        for group in trained.param_groups:
            group["lr"] = peak * rate_factor(LrSchedule.model_validate(schedule or {}), step, steps)
        if is_used(used_losses, loss):
            used_losses.append(loss)
            trained.step()
        else:
            run.skipped.append(step + 1)
        cursor = sampler.advance(cursor)
    run.parameters = {name: value.detach() for name, value in model.named_parameters()}
    with torch.no_grad():
        run.held_out_loss = float(losses_of(model(held_out.tensors[0]), held_out.tensors[1]).mean())
    return run
