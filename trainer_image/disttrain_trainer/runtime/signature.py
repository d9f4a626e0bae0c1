"""Identifies a failure that occurs again: the type of the exception, and the place that raised it."""

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NamedTuple

from disttrain_api.report import MAX_ERROR_NAME, MAX_PLACE, FailureSignature

# Frames of these say little: a wrong shape is found by torch, and made by the model that calls it.
_LIBRARIES = sys.stdlib_module_names | {"torch"}
_ORIGIN = "_disttrain_origin"
# Their types are named without a module.
_PLAIN = frozenset({"builtins", "disttrain_trainer.runtime.errors"})


def signature_of(error: BaseException, step: int | None = None) -> FailureSignature:
    """Return the signature of `error`. step: where the error itself belongs to one."""
    return FailureSignature(error=_type_name(type(error)), place=origin_of(error).place, step=step)


class Origin(NamedTuple):
    """The place that raised an exception."""

    place: str | None
    """`file:line` of the innermost frame outside of libraries; of the innermost one where there is no other."""
    module: str
    """That of the innermost frame outside of the standard library; empty where there is none."""


def origin_of(error: BaseException) -> Origin:
    """Return what raised it, also in another process."""
    known: Origin | None = getattr(error, _ORIGIN, None)
    return known or Origin(_place(error.__traceback__), _module(error.__traceback__))


def raised_at(error: BaseException, origin: Origin) -> BaseException:
    """Return the error, which something in another process has raised."""
    with suppress(AttributeError, TypeError):
        setattr(error, _ORIGIN, origin)
    return error


def raised_in(error: BaseException, packages: Sequence[str]) -> bool:
    """Return whether the innermost frame outside of the standard library belongs to one of these packages."""
    module = origin_of(error).module
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _type_name(kind: type[BaseException]) -> str:
    name = kind.__qualname__ if kind.__module__ in _PLAIN else f"{kind.__module__}.{kind.__qualname__}"
    return name[-MAX_ERROR_NAME:]


def _module(trace: TracebackType | None) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    modules = (str(frame.f_globals.get("__name__", "")) for frame in reversed(frames))
    return next((name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names), "")


def _place(trace: TracebackType | None) -> str | None:
    frames = list(traceback.walk_tb(trace))
    if not frames:
        return None
    outside = [(frame, line) for frame, line in frames if not _of_library(frame)]
    frame, line = (outside or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}"[-MAX_PLACE:].encode(errors="replace").decode()


def _of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
