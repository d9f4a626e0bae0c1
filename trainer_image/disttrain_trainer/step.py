"""One step of a rank: its samples, their gradient, the clip and the update. What is due after it: between_steps.py."""

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from disttrain_trainer.data.batches import Microbatch, load_microbatches
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.metrics.own_time import PassClock
from disttrain_trainer.optim.groups import FACTOR
from disttrain_trainer.parallel.activations import offload
from disttrain_trainer.parallel.data_parallel import (
    passes_to_form_buckets,
    require_all_used,
    searches,
    synchronize_gradients,
    without_search,
)
from disttrain_trainer.parallel.gradient_norm import GradientNorm, clip, norm_of_gradients
from disttrain_trainer.parallel.sparse_gradients import settle_sparse_gradients
from disttrain_trainer.parallel.tensor import settle_gradients
from disttrain_trainer.parallel.untouched import Untouched
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import keeping_random_state
from disttrain_trainer.state import State


def load_step(state: State, world: World, cursor: Cursor) -> list[Microbatch]:
    """Return this rank's microbatches of the global batch at `cursor`, read ahead where the job has processes for that
    or its steps are small; none where the rank uses none, in the middle of a pipeline."""
    if state.loader is not None and state.takes_samples:
        return state.loader.load(cursor, world.device.torch)
    return read_step(state, world, cursor)


def read_step(state: State, world: World, cursor: Cursor, first_replica: int = 0) -> list[Microbatch]:
    """Return the same, read here. first_replica: of the job's, the one that the first replica of this world is."""
    if not state.takes_samples:
        return []
    slots = state.sampler.microbatches(cursor, first_replica + world.replica)
    return load_microbatches(state.task, state.data.training, slots, world.device.torch)


def settle_buckets(state: State, world: World, *, always_search: bool) -> None:
    """Learn how DDP is to sum gradients, from passes over one microbatch that change nothing else. Collective.

    Where the microbatch uses all parameters on all ranks, DDP no longer searches each step for unused ones, unless
    `always_search`. It then forms the buckets that it keeps.
    """
    learns = searches(state.model) and not always_search
    if not learns and not passes_to_form_buckets(state.model):
        return
    untouched = Untouched([state.module])
    with keeping_random_state():
        microbatch = read_step(state, world, state.cursor)[:1]
        if learns and _uses_all_parameters(state, world, microbatch):
            state.model = without_search(state.model)
        for _ in range(passes_to_form_buckets(state.model)):
            accumulate_gradients(state, microbatch, 1.0, 1.0, world.parts)
            state.optimizer.zero_grad()
    state.routing.take_figures(1.0, 2)
    state.figures.clear()
    untouched.put_back()


def _uses_all_parameters(state: State, world: World, microbatch: list[Microbatch]) -> bool:
    """Whether each trained parameter gets a gradient on each rank."""
    assert isinstance(state.model, DistributedDataParallel)
    with state.model.no_sync():
        accumulate_gradients(state, microbatch, 1.0, 1.0, world.parts)
    unused = sum(parameter.grad is None for parameter in state.parameters)
    state.optimizer.zero_grad()
    return world.sum(unused) == [0.0]


def accumulate_gradients(
    state: State,
    microbatches: list[Microbatch],
    weight: float,
    samples: float,
    parts: int,
    clock: PassClock | None = None,
) -> torch.Tensor:
    """Gradient of the mean loss over all samples (tokens) of all replicas and microbatches; this rank's part of it.

    `weight` is the number of those samples (tokens), `samples` that of samples: auxiliary losses of experts are means
    over these. `parts` gradients are averaged where the losses are summed, hence x parts. `clock` times the passes,
    but not those of a pipeline.
    """
    state.routing.gradient = state.precision.scaled_one() * (parts / samples)
    if state.pipeline is not None:
        return state.pipeline.accumulate_gradients(microbatches, weight, parts)
    total = torch.zeros((), device=state.precision.device)
    if clock is not None:
        clock.begin()
    for index, batch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        with synchronize_gradients(state.model, now=last):
            with (
                state.precision.autocast(),
                offload(state.precision.device, state.offload_activations),
                state.routing.microbatch(batch.weights),
            ):
                found = state.task.loss(state.model, batch)
                loss = found.sum / weight
            if clock is not None and last:
                clock.end_with(loss)
            state.precision.backward(loss * parts)
        state.figures.add(found.figures)
        total = total + loss.detach()
    require_all_used(state.model)
    state.average_whole()
    return total


@torch.no_grad()
def clip_gradients(state: State, maximum: float | None, world: World) -> GradientNorm:
    """Scale the gradient down to `maximum` where its 2-norm is above it.

    Returns the norm that it had: where nothing clips, the update does not wait for ranks that are still in their
    backward pass, as those of a pipeline's first stage are. Raises InvalidConfiguration where the gradient is sparse
    and the job does not take that.
    """
    settle_sparse_gradients(state.parameters, state.module, state.optimizer, state.takes_no_sparse_gradient)
    settle_gradients(state.parameters)
    state.precision.unscale(state.parameters)
    copies = state.pipeline.copies if state.pipeline is not None else None
    norm = norm_of_gradients(state.parameters, world, copies)
    if maximum is not None:
        clip(state.parameters, norm(), maximum)
    return norm


def update_parameters(state: State, rate: float, norm: Callable[[], torch.Tensor] | None = None) -> None:
    """One optimizer step; the state then stands after it. norm: the gradient's, as `clip_gradients` returns it; FP16
    needs it."""
    for group in state.optimizer.param_groups:
        group["lr"] = rate * group.get(FACTOR, 1.0)
    state.precision.update(state.optimizer, norm)
    skip_update(state)


def skip_update(state: State) -> None:
    """Leave the step behind without its update: the gradient is dropped, and its samples are used up."""
    state.optimizer.zero_grad()
    state.cursor = state.sampler.advance(state.cursor)
    state.step += 1
