"""Texts that a language model writes after prompts, token by token, in every layout that evaluates.

All ranks know all that has been written, by a sum over them after each token. So they divide the texts that go on anew
each time, call the model equally often, and end together.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from disttrain_trainer.data.batches import Microbatch, on_device, share_of
from disttrain_trainer.data.prompts import Prompts
from disttrain_trainer.evaluate import all_succeed, called_alone, evaluated_model
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.parallel.data_parallel import share_buffers
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State
from disttrain_trainer.tasks.base import Forward
from disttrain_trainer.tasks.supervised import Supervised

_LENGTHS = 64
"""Inputs are filled up to a multiple of it, so that compiled models and GPUs see few lengths."""


def write_samples(state: State, world: World, batch_size: int, seed: int, moved: Callable[[], object]) -> list[str]:
    """Return the text that the model writes after each prompt; none where there are none. Ranks call it together.

    moved: called after each token. Raises EvaluationFailed as `evaluate` does.
    """
    prompts = state.data.prompts
    if prompts is None:
        return []
    share_buffers(state.module, world)
    texts: list[str] = []
    with all_succeed(state, world):
        written = _write(state, world, prompts, batch_size, seed, moved)
        texts += [prompts.text_after(number, tokens) for number, tokens in enumerate(written)]
    return texts


def _write(
    state: State, world: World, prompts: Prompts, batch_size: int, seed: int, moved: Callable[[], object]
) -> list[list[int]]:
    """Return the tokens after each prompt; fewer where another rank has failed, which `all_succeed` finds."""
    model, config = evaluated_model(state), prompts.config
    ends = {prompts.codec.end, *(offered(state.module, "end_tokens") or list)()}
    written: list[list[int]] = [[] for _ in prompts.rows]
    going = list(range(len(written)))
    while going:
        # The last entry says how many ranks have failed.
        own, failure = torch.zeros(len(going) + 1, dtype=torch.float64), None
        try:
            own[:-1] = _own_next_tokens(state, world, model, prompts, written, going, batch_size, seed)
        except (Exception, SystemExit) as error:
            if not called_alone(world):
                raise
            own[-1], failure = 1, error
        *found, failed = world.sum_tensor(own).tolist()
        moved()
        if failure is not None:
            raise failure
        if failed:
            break
        for number, token in zip(going, found, strict=True):
            written[number].append(int(token))
        going = [
            number
            for number in going
            if written[number][-1] not in ends and len(written[number]) < config.max_new_tokens
        ]
    return written


def _own_next_tokens(
    state: State, world: World, model: Forward, prompts: Prompts, written: Sequence[Sequence[int]],
    going: Sequence[int], batch_size: int, seed: int,
) -> Tensor:  # fmt: skip
    """Return what this rank finds of the next token of each text that goes on, [going] in float64: the sum over the
    ranks is the whole."""
    assert isinstance(state.task, Supervised)
    found = torch.zeros(len(going), dtype=torch.float64)
    sequences = [torch.tensor([*prompts.rows[number].tolist(), *written[number]]) for number in going]
    length = _filled(max(map(len, sequences)), prompts.longest, state.input_multiple)
    for slots in share_of(len(going), batch_size, world.replica, world.replicas, draws=False):
        samples = [_to_continue(sequences[at]) for at in slots.indices]
        weights = torch.from_numpy(slots.weights)
        batch = state.task.batch_of_lengths(samples, length)
        microbatch = on_device(Microbatch(batch, weights, 0.0, int(weights.sum())), world.device.torch)
        with state.precision.autocast():
            outputs = state.task.marked_outputs(model, microbatch)
        if outputs is None or not world.counts_outputs:
            continue
        rows, logits = outputs
        numbers = slots.indices[rows]
        draws = [_draw(seed, state.step, going[at], len(written[going[at]])) for at in numbers]
        tokens = next_tokens(logits, draws, prompts.config.temperature, prompts.config.top_k)
        counted = slots.weights[rows] > 0
        found[numbers[counted]] = tokens.to("cpu", torch.float64)[torch.from_numpy(counted)]
    return found


def _filled(length: int, longest: int, multiple: int) -> int:
    """Return what inputs of this length are filled up to. longest: there will be."""
    step = multiple * -(-_LENGTHS // multiple)
    return min(-(-length // step) * step, -(-longest // multiple) * multiple)


def _to_continue(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens, and targets of which the last one alone is marked; both [T]."""
    targets = torch.full_like(tokens, IGNORED)
    targets[-1] = 0
    return tokens, targets


def _draw(*numbers: int) -> float:
    """Return a number from 0 to 1 that these numbers determine, whatever the layout."""
    return float(np.random.default_rng(numbers).random())


def next_tokens(logits: Tensor, draws: Sequence[float], temperature: float | None, top_k: int | None) -> Tensor:
    """Return the token that follows in each row [n]: the most probable one, or at a temperature the one at this part of
    the probabilities, in the order of the tokens. logits: [n, V]; draws: [n], from 0 to 1."""
    if temperature is None:
        return logits.argmax(-1)
    scores = logits.to("cpu", torch.float64) / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    sums = scores.softmax(-1).cumsum(-1)
    wanted = torch.tensor(draws, dtype=torch.float64).unsqueeze(-1) * sums[:, -1:]
    return torch.searchsorted(sums, wanted, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)
