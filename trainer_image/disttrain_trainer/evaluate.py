"""Evaluation on held-out data: every sample exactly once, whatever the number of ranks."""

import math
import traceback

import torch
from torch.distributed.tensor import DTensor

from disttrain_api.report import MAX_SENTENCE
from disttrain_trainer.data.batches import Microbatch, load_microbatch, share_of
from disttrain_trainer.errors import EvaluationFailed, last_line, peer_lost
from disttrain_trainer.losses import IGNORED, over
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.data_parallel import share_buffers, without_ddp
from disttrain_trainer.state import State


def evaluate(state: State, world: World, batch_size: int) -> dict[str, float]:
    """`loss`: mean over held-out samples (tokens); `accuracy`, where targets are classes: part that is right.

    Empty where no data is held out. Raises EvaluationFailed where data, model or loss raise: on every rank, unless
    ranks talk to each other meanwhile. Then others may wait for the one that failed, and it alone raises.
    """
    dataset = state.data.held_out
    if dataset is None or len(dataset) == 0:
        return {}
    share_buffers(state.module, world)
    training = state.module.training
    state.module.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=world.device.torch)
    failure: BaseException | None = None
    try:
        with torch.no_grad():
            for slots in share_of(len(dataset), batch_size, world.replica, world.replicas):
                totals += _totals_of(state, load_microbatch(dataset, slots, world.device.torch))
    except (Exception, SystemExit) as error:
        if peer_lost(error):
            raise
        traceback.print_exception(error)
        failure = error
    finally:
        state.module.train(training)
    _require_success(failure, state.step, world)
    loss, weight, right, judged = world.sum_tensor(totals * world.speaks).tolist()
    metrics = {"loss": loss / weight if weight else math.nan}
    return {**metrics, "accuracy": right / judged} if judged else metrics


def _require_success(failure: BaseException | None, step: int, world: World) -> None:
    """Raise EvaluationFailed where the evaluation has failed on this rank, or on another that can still say so."""
    why = failure and f"rank {world.rank}: {type(failure).__name__}: {last_line(failure)}"
    alone = world.mesh.replicate == world.size
    found = world.gather(why, str | None) if alone else [why]
    if any(found):
        first = next(one for one in found if one)
        error = EvaluationFailed(f"the evaluation after step {step} failed on {first}"[:MAX_SENTENCE])
        error.on_every_rank = alone
        raise error from failure


def _totals_of(state: State, batch: Microbatch) -> torch.Tensor:
    """Loss sum, weight, elements whose class is right, elements that have a class; zeros where outputs are not."""
    with state.precision.autocast():
        outputs = state.pipeline.outputs(batch.inputs) if state.pipeline else without_ddp(state.model)(batch.inputs)
        if outputs is None:
            return torch.zeros(4, dtype=torch.float64, device=batch.inputs.device)
        loss = state.loss.sum(outputs, batch.targets, batch.weights)
    right = judged = torch.zeros((), device=loss.device)
    if not batch.targets.is_floating_point():
        counted = (batch.targets != IGNORED) & (over(batch.weights, batch.targets) > 0)
        if isinstance(outputs, DTensor):
            outputs = outputs.full_tensor()
        right, judged = ((outputs.argmax(-1) == batch.targets) & counted).sum(), counted.sum()
    weight = torch.tensor(batch.weight, dtype=torch.float64, device=loss.device)
    return torch.stack([value.to(torch.float64) for value in (loss, weight, right, judged)])
