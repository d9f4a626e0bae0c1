"""K replicas that train alone, simulated in one process from the papers' formulas: what runs are held to.

Nothing here is of the trainer but the order of the samples and the seeds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from disttrain_api.batch import Batch
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.runtime.randomness import seed_everything
from tests.unit.trainer.user_code import double_mlp, double_samples

SEED, GLOBAL_BATCH = 0, 24
Sync = Callable[["Workers", int], None]
"""What happens after so many steps."""


@dataclass
class Workers:
    """Models that began alike, and an optimizer for each."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    evaluated: Tensor | None = None
    """The parameters that are to be evaluated; None: the mean of all as they are."""
    losses: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)

    @property
    def vectors(self) -> list[Tensor]:
        return [parameters_to_vector(model.parameters()).detach() for model in self.models]

    def mean(self, members: range | None = None) -> Tensor:
        chosen = self.vectors if members is None else [self.vectors[worker] for worker in members]
        return torch.stack(chosen).mean(0)

    def put(self, vector: Tensor, members: range | None = None) -> None:
        for worker in members or range(len(self.models)):
            vector_to_parameters(vector.clone(), self.models[worker].parameters())

    def average_optimizers(self) -> None:
        for states in zip(*(optimizer.state.values() for optimizer in self.optimizers), strict=True):
            for kind in states[0]:
                mean = torch.stack([state[kind] for state in states]).mean(0)
                for state in states:
                    state[kind].copy_(mean)


def simulate(
    ranks: int, make_optimizer: Callable[..., torch.optim.Optimizer], steps: int, sync: Sync, *, summed_steps: int = 0,
    clip: float | None = None, samples: tuple[TensorDataset, TensorDataset] | None = None,
) -> Workers:  # fmt: skip
    """Steps of all workers, `sync` after each. In the first `summed_steps` all take the gradient of the whole batch.
    No worker makes an update of a step whose loss is not finite."""
    workers = _begin(ranks, make_optimizer)
    training, held_out = samples or double_samples()
    sampler = Sampler(
        len(training), SEED, Batch(micro=GLOBAL_BATCH // ranks, accumulation=1, world=GLOBAL_BATCH), ranks
    )
    cursor = Cursor()
    for done in range(steps):
        parts = []
        for worker, model in enumerate(workers.models):
            (slots,) = sampler.microbatches(cursor, worker)
            inputs, targets = (tensor[torch.from_numpy(slots.indices)] for tensor in training.tensors)
            weights = torch.from_numpy(slots.weights).double()
            loss = (functional.cross_entropy(model(inputs), targets, reduction="none") * weights).sum()
            parts.append((loss, weights.sum()))
        total = torch.stack([weight for _, weight in parts]).sum()
        workers.losses.append(float(sum(loss.detach() for loss, _ in parts) / total))
        gradients = [
            torch.autograd.grad(
                loss / (total if done < summed_steps else weight.clamp(min=1)), list(model.parameters())
            )
            for (loss, weight), model in zip(parts, workers.models, strict=True)
        ]
        if done < summed_steps:
            gradients = ranks * [[sum(parts) for parts in zip(*gradients, strict=True)]]
        for model, own, optimizer in zip(workers.models, gradients, workers.optimizers, strict=True):
            for parameter, gradient in zip(model.parameters(), own, strict=True):
                parameter.grad = gradient.clone()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if math.isfinite(workers.losses[-1]):
                optimizer.step()
        cursor = sampler.advance(cursor)
        sync(workers, done + 1)
        workers.held_out_losses.append(_loss_on(held_out.tensors, workers))
    return workers


def _begin(ranks: int, make_optimizer: Callable[..., torch.optim.Optimizer]) -> Workers:
    models = []
    for _ in range(ranks):
        seed_everything(SEED)
        models.append(double_mlp())
    return Workers(models, [make_optimizer(model.parameters()) for model in models])


def _loss_on(samples: tuple[Tensor, ...], workers: Workers) -> float:
    model = double_mlp()
    vector_to_parameters(workers.mean() if workers.evaluated is None else workers.evaluated, model.parameters())
    with torch.no_grad():
        return float(functional.cross_entropy(model(samples[0]), samples[1]))


def ends_block(done: int, period: int, steps: int) -> bool:
    """Whether all meet after `done` steps; the last step of a run ends its last block."""
    return done % period == 0 or done == steps


def local_sgd(period: int, steps: int, *, begin: int = 0, average_optimizers: bool = False) -> Sync:
    """Stich 2019, algorithm 1. `begin`: steps before, in which gradients are summed (Lin et al. 2020)."""

    def sync(workers: Workers, done: int) -> None:
        if done > begin and ends_block(done - begin, period, steps - begin):
            workers.put(workers.mean())
            if average_optimizers:
                workers.average_optimizers()

    return sync


def hierarchical(pod: int, period: int, global_period: int, steps: int) -> Sync:
    """Lin et al. 2020, hierarchical local SGD: pods of so many workers average among themselves in between."""

    def sync(workers: Workers, done: int) -> None:
        if ends_block(done, global_period, steps):
            workers.put(workers.mean())
        elif done % period == 0:
            for first in range(0, len(workers.models), pod):
                members = range(first, first + pod)
                workers.put(workers.mean(members), members)

    return sync


def bmuf(
    period: int, steps: int, momentum: float, rate: float, *, nesterov: bool, plain: int = 0, reset: bool = False
) -> Sync:
    """Chen and Huo 2016: G = mean - V(t-1); D(t) = momentum D(t-1) + rate G; W(t) = W(t-1) + D(t).

    V is what the workers are given at the end of a block: W, or with Nesterov's momentum W + momentum D.
    """
    state: dict[str, Tensor] = {}

    def sync(workers: Workers, done: int) -> None:
        if not state:
            state["W"] = state["V"] = _initial()
            state["D"] = torch.zeros_like(state["W"])
        if ends_block(done, period, steps):
            mean = workers.mean()
            if done <= plain:
                state["W"] = state["V"] = mean
            else:
                state["D"] = momentum * state["D"] + rate * (mean - state["V"])
                state["W"] = state["W"] + state["D"]
                state["V"] = state["W"] + momentum * state["D"] if nesterov else state["W"]
            workers.put(state["V"] if done < steps else state["W"])
            for optimizer in workers.optimizers if reset else ():
                optimizer.state.clear()
        workers.evaluated = state["W"]

    return sync


def diloco(period: int, steps: int, rate: float, momentum: float) -> Sync:
    """Douillard et al. 2023, algorithm 1, with torch's own Nesterov SGD as the outer optimizer."""
    kept: dict[str, object] = {}

    def sync(workers: Workers, done: int) -> None:
        if not kept:
            kept["model"] = nn.Parameter(_initial())
            kept["outer"] = torch.optim.SGD([kept["model"]], lr=rate, momentum=momentum, nesterov=True)
        if ends_block(done, period, steps):
            kept["model"].grad = kept["model"].detach() - workers.mean()
            kept["outer"].step()
            workers.put(kept["model"].detach())
        workers.evaluated = kept["model"].detach()

    return sync


def _initial() -> Tensor:
    seed_everything(SEED)
    return parameters_to_vector(double_mlp().parameters()).detach()


def named(vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of a vector of all parameters."""
    model = double_mlp()
    vector_to_parameters(vector, model.parameters())
    return ((name, value.detach()) for name, value in model.named_parameters())
