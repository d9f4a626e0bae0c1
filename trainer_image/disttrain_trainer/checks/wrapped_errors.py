"""Errors that come of how a user's model is wrapped, not of the model alone: shards and DDP."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from disttrain_api.compute import Precision
from disttrain_trainer.parallel.sharded import HALVES
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.state import State

# torch has no classes for them; its words are all there is.
_NOT_GATHERED = "mixed torch.Tensor and DTensor"
_FORMATS = re.compile(r"same dtype|expected scalar type|expected .* to have (the )?dtype", re.IGNORECASE)
_NO_KERNEL = re.compile(r"No (available kernel|viable backend)")
_TWICE = re.compile(r"mark(ed)? (a variable )?(as )?ready (twice|only once)")
_NAME = re.compile(r"with name (\S+) has been marked")


def explained(error: BaseException, config: Config, state: State) -> str | None:
    """Return advice on an error that the wrapping of the model has caused; None for every other error."""
    text = "\n".join(str(one) for one in _chain(error))
    if (kernel := config.training.attention) is not None and _NO_KERNEL.search(text):
        return (
            f"`training.attention`: the kernel {kernel} does not compute this model's attention on this device (its "
            "mask, dropout, heads or number format; torch's warnings above say which): use another one, or remove it"
        )
    if isinstance(state.model, DistributedDataParallel) and _TWICE.search(text):
        return _computed_twice(text, state)
    if not any(isinstance(part, FSDPModule) for part in state.module.modules()):
        return None
    names = {id(part): name for name, part in state.module.named_modules()}
    frames = [frame for one in _chain(error) for frame, _ in traceback.walk_tb(one.__traceback__)]
    forward = [frame for frame in frames if _is_forward(frame, names)]
    if _NOT_GATHERED in text and forward:
        own = [frame for frame in frames if "/torch/" not in frame.f_code.co_filename] or forward
        return _not_gathered(forward, state.module, names, _line(own[-1], error))
    if config.training.precision in HALVES and _FORMATS.search(text) and forward:
        return _several_formats(forward[-1].f_locals["self"], config.training.precision, names)
    return None


def _computed_twice(text: str, state: State) -> str:
    name = _NAME.search(text)
    what = f"`{name[1].removeprefix('module.')}`" if name else "a parameter"
    return (
        f"`training.model`: {kind_of(state.module)} computes {what} anew in the backward pass, which DDP meets twice: "
        "set `parallelism.dataParallel.staticGraph: true`, or call torch's checkpoint with use_reentrant=False"
    )


def _not_gathered(forward: list[FrameType], root: nn.Module, names: dict[int, str], line: str) -> str:
    unit = _not_called(forward, root, names)
    whose = f"of `{unit[0]}` ({kind_of(unit[1])}) without calling it" if unit else "of a layer without calling it"
    return (
        f"`training.model`: {kind_of(root)} uses parameters {whose}, and shards gather them when it is called: call "
        f"the layer, not its parts (at {line})"
    )


def _several_formats(part: nn.Module, precision: Precision, names: dict[int, str]) -> str:
    where = f"`{names[id(part)]}` ({kind_of(part)})" if names[id(part)] else kind_of(part)
    return (
        f"`training.precision` {precision.value}: {where} computes with numbers of several formats; shards cast "
        "parameters and inputs of layers, and neither buffers nor what a layer makes itself: cast these to the "
        "inputs' format"
    )


def kind_of(module: nn.Module) -> str:
    """The name of the module's class, without what FSDP2 puts before it."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _not_called(forward: list[FrameType], root: nn.Module, names: dict[int, str]) -> tuple[str, nn.Module] | None:
    """The unit whose parameters are not gathered: that of the innermost layer, or one that its code has at hand."""
    called = {id(frame.f_locals["self"]) for frame in forward}
    at_hand = [part for part in forward[-1].f_locals.values() if isinstance(part, nn.Module) and id(part) in names]
    for part in (forward[-1].f_locals["self"], *reversed(at_hand)):
        path = names[id(part)].split(".") if names[id(part)] else []
        above = [".".join(path[:size]) for size in range(len(path), 0, -1)]
        for name in above:
            unit = root.get_submodule(name)
            if isinstance(unit, FSDPModule) and id(unit) not in called:
                return name, unit
    return None


def _is_forward(frame: FrameType, names: dict[int, str]) -> bool:
    return frame.f_code.co_name == "forward" and id(frame.f_locals.get("self")) in names


def _line(frame: FrameType, error: BaseException) -> str:
    numbers = [line for one in _chain(error) for found, line in traceback.walk_tb(one.__traceback__) if found is frame]
    return f"{Path(frame.f_code.co_filename).name} line {numbers[-1]}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from: pipelines raise another one, and DTensors hide theirs."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
