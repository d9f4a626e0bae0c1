"""Log-likelihoods of choices, row by row over the replicas, in every layout that evaluates."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from disttrain_trainer.data.batches import Microbatch, on_device, share_of
from disttrain_trainer.data.choices import ChoiceTask
from disttrain_trainer.data.prompts import Prompts
from disttrain_trainer.parallel.context.part import Context
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State
from disttrain_trainer.tasks.base import Forward
from disttrain_trainer.tasks.supervised import Supervised


def own_log_likelihoods(
    state: State, world: World, model: Forward, task: ChoiceTask, batch_size: int, moved: Callable[[], object]
) -> Tensor:
    """Return what this rank finds of each row's log-likelihood, [rows] in float64: the sum over the ranks that count
    their outputs is the whole. Ranks that share layers call it together, with as many batches each. moved: called after
    each batch."""
    assert isinstance(state.task, Supervised)
    found = torch.zeros(len(task.rows), dtype=torch.float64)
    for slots in share_of(len(task.rows), batch_size, world.replica, world.replicas, draws=False):
        rows = task.order[slots.indices]
        batch = state.task.batch_of_lengths([task.sample(row) for row in rows], state.input_multiple)
        weights = torch.from_numpy(slots.weights)
        microbatch = on_device(Microbatch(batch, weights, 0.0, int(weights.sum())), world.device.torch)
        with state.precision.autocast():
            losses = state.task.token_losses(model, microbatch)
        if losses is not None:
            counted = slots.weights > 0
            found[rows[counted]] = -losses.to("cpu", torch.float64).sum(1)[torch.from_numpy(counted)]
        moved()
    return found


def multiple_of_lengths(part: Context | None, config: Config, world: World) -> int:
    """Return what the length of every input must be a multiple of. part: of sequences that is computed; None: all."""
    cut = world.mesh.context * (world.mesh.tensor if config.job.parallelism.sequence_parallel else 1)
    return math.lcm(cut, 1 if part is None else part.pieces)


def require_fit(field: str, inputs: ChoiceTask | Prompts, model: nn.Module, multiple: int, longest: int) -> None:
    """Raise InvalidConfiguration where the model does not take the tokens, or not as many. longest: input that it
    takes."""
    size_of = offered(model, "vocabulary_size")
    if size_of is not None and (size := size_of()) < inputs.vocabulary:
        raise InvalidConfiguration(
            f"`training.model`: its vocabulary of {size} must be greater than or equal to that of `{field}`, which is "
            f"{inputs.vocabulary}"
        )
    filled = -(-inputs.longest // multiple) * multiple
    if filled > longest:
        raise InvalidConfiguration(
            f"`{field}`: inputs of {inputs.longest} tokens are filled up to {filled}, a multiple of {multiple}, so that"
            f" they can be cut over ranks; the model takes {longest}: shorten the texts"
        )
