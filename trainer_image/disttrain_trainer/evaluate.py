"""Evaluation on held-out data: every sample exactly once, whatever the number of ranks."""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from disttrain_api.report import MAX_SENTENCE
from disttrain_trainer.choices import own_log_likelihoods
from disttrain_trainer.data.batches import load_microbatch, loss_of, share_of
from disttrain_trainer.data.sampler import Slots
from disttrain_trainer.parallel.data_parallel import share_buffers, without_ddp
from disttrain_trainer.parallel.sharded import reshard
from disttrain_trainer.runtime.errors import EvaluationFailed, peer_lost
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State
from disttrain_trainer.tasks.base import PERPLEXITY, Forward
from disttrain_trainer.tasks.figures import Figures


def evaluate(state: State, world: World, batch_size: int, moved: Callable[[], object]) -> dict[str, float]:
    """The task's figures, means over all held-out samples (tokens), and those of `evaluation.choices`. For the built-in
    task the former are `loss`, `accuracy` where outputs are scores of classes, and `perplexity` where the loss is the
    cross-entropy of tokens; and of several corpora the loss of each, by its name.

    Empty where there is nothing to evaluate. Raises EvaluationFailed where data, model or loss raise: on every rank,
    unless ranks talk to each other meanwhile. Then others may wait for the one that failed, and it alone raises.

    moved: called after each batch.
    """
    dataset = state.data.held_out
    held_out = 0 if dataset is None else len(dataset)
    if not held_out and not state.data.choices:
        return {}
    share_buffers(state.module, world)
    model = evaluated_model(state)
    totals, of_parts, scores = Figures(), Figures(), []
    with all_succeed(state, world):
        for part, slots in _own_slots(state, world, held_out, batch_size):
            assert dataset is not None
            batch = load_microbatch(state.task, dataset, slots, world.device.torch)
            with state.precision.autocast():
                found = state.task.evaluate(model, batch)
            totals.add(found)
            if part is not None and "loss" in found:
                of_parts.add({loss_of(part): found["loss"]})
            moved()
        scores = [own_log_likelihoods(state, world, model, task, batch_size, moved) for task in state.data.choices]
    figures = totals.take(world) if held_out else {}
    if held_out and state.task.has_figure(PERPLEXITY, state.data):
        figures |= perplexity_of(figures["loss"])
    figures |= of_parts.take(world) if state.data.parts else {}
    for task, own_scores in zip(state.data.choices, scores, strict=True):
        figures |= task.figures(world.sum_tensor(own_scores * world.counts_outputs).tolist())
    return figures


def _own_slots(state: State, world: World, held_out: int, batch_size: int) -> Iterator[tuple[str | None, Slots]]:
    """Yield this rank's batches of what is held out, each with the name of its part; all ranks have as many."""
    start = 0
    for name, size in state.data.parts or ((None, held_out),):
        for slots in share_of(size, batch_size, world.replica, world.replicas, draws=state.data.draws):
            yield name, replace(slots, indices=slots.indices + start)
        start += size


def perplexity_of(loss: float) -> dict[str, float]:
    """The exponential of a mean loss per token, by its name; nothing where that is not finite."""
    try:
        found = math.exp(loss)
    except OverflowError:
        return {}
    return {PERPLEXITY: found} if math.isfinite(found) else {}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, all modules are in evaluation mode; afterwards each is in its own again, also one that is frozen."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            # From the outside in: `train` also sets what is inside, and may be a method of the user's.
            if one.training is not training:
                one.train(training)


def evaluated_model(state: State) -> Forward:
    """Return what evaluations call: a batch's inputs to its outputs, None on ranks of a pipeline without these."""
    return state.pipeline.outputs if state.pipeline else without_ddp(state.model)


@contextmanager
def all_succeed(state: State, world: World) -> Iterator[None]:
    """Inside, the model is evaluated. Raises EvaluationFailed where this rank has failed, or another that can still say
    so."""
    failure: BaseException | None = None
    try:
        with evaluating(state.module), torch.no_grad():
            yield
    except (Exception, SystemExit) as error:
        if peer_lost(error):
            raise
        traceback.print_exception(error)
        failure = error
    finally:
        # Callbacks may have put other parameters in place, of which nothing gathered may stay.
        reshard(state.module)
    _require_success(failure, state.step, world)


def called_alone(world: World) -> bool:
    """Return whether each rank calls the model alone, so that one that fails can still say so."""
    return world.mesh.replicate == world.size


def _require_success(failure: BaseException | None, step: int, world: World) -> None:
    """Raise EvaluationFailed where the evaluation has failed on this rank, or on another that can still say so."""
    # Its text may be of a sample, and stands with its traceback in the log.
    why = failure and f"rank {world.rank}: {type(failure).__name__}"
    alone = called_alone(world)
    found = world.gather(why, str | None) if alone else [why]
    if any(found):
        first = next(one for one in found if one)
        error = EvaluationFailed(f"the evaluation after step {step} failed on {first}"[:MAX_SENTENCE])
        error.on_every_rank = alone
        raise error from failure
