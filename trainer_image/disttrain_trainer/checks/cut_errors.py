"""Errors of a step that the manifest's layout has caused: shapes of cut layers, gradients that are not summed; those of
wrapping layers are in wrapped_errors.py.

Sizes of parameters are checked when they are cut (parallel/tensor.py). What else a forward pass counts on, such as
whole heads, only the forward pass knows.
"""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from disttrain_trainer.checks.wrapped_errors import explained, kind_of
from disttrain_trainer.data.batches import load_microbatch, moved
from disttrain_trainer.parallel.sparse_gradients import require_summed
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

# torch has no class for them; its words are all there is.
_ABOUT_SHAPES = re.compile(r"\b(sizes?|shapes?|dim|dimensions?)\b", re.IGNORECASE)


@contextmanager
def explaining_cuts(config: Config, world: World, state: State) -> Iterator[None]:
    """Raises InvalidConfiguration for an error that comes of how the model is wrapped, for one of sparse gradients that
    are not summed, and, with the layer's name, for one of shapes in the forward pass of a model whose layers are cut
    over a tensor group, where it would not come of whole ones. Every other error leaves as it is.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        require_summed(error, state.module)
        if (sentence := explained(error, config, state)) is not None:
            raise InvalidConfiguration(sentence) from error
        layer, message = _place_of(error, state.module)
        if world.mesh.tensor == 1 or layer is None or message is None or not _whole_computes(state):
            raise
        raise InvalidConfiguration(
            f"`parallelism.tensorParallelDegree`: {kind_of(state.module)} fails in {layer} with its layers cut, and "
            f"not with whole ones ({message}): what its forward pass counts on besides the sizes of parameters, such "
            f"as whole heads, must be shared by {world.mesh.tensor} ranks, too"
        ) from error


def _place_of(error: BaseException, module: nn.Module) -> tuple[str | None, str | None]:
    """Return the innermost part of the module in whose forward pass the error arose, and its shapes."""
    names = {id(part): name for name, part in module.named_modules()}
    layer, message = None, None
    found: BaseException | None = error
    # Pipelines raise another error from that of a layer, and DTensors one that hides what it was raised from.
    while found is not None:
        for frame, _ in traceback.walk_tb(found.__traceback__):
            part = frame.f_locals.get("self")
            if frame.f_code.co_name == "forward" and id(part) in names:
                layer = f"`{names[id(part)]}` ({kind_of(part)})" if names[id(part)] else "its forward pass"
                message = _about_shapes(found)
        found = found.__cause__
    return layer, message


def _about_shapes(error: BaseException) -> str | None:
    """The last line of the error's text that is about shapes."""
    lines = [line.strip() for line in str(error).splitlines() if _ABOUT_SHAPES.search(line)]
    return lines[-1] if lines else None


def _whole_computes(state: State) -> bool:
    """Whether the uncut model takes a microbatch; found on the meta device, where there are shapes and no numbers."""
    slots = state.sampler.microbatches(state.cursor, 0)[0]
    try:
        batch = load_microbatch(state.task, state.data.training, slots, torch.device("cpu"))
        meta = torch.device("meta")
        whole = replace(batch, batch=moved(batch.batch, meta), weights=batch.weights.to(meta))
        with meta, torch.no_grad():
            state.task.loss(state.task.model(), whole)
    # What a user's code raises here is nobody's news: the first error is.
    except Exception:
        return False
    return True
