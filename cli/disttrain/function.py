"""A job from a function, in a script or a notebook.

>>> import disttrain
>>> @disttrain.train(workers=4, gpus=8, image="registry.example.com/me/train:1")
... def fit(rate: float = 1e-3) -> None:
...     import torch
...
...     torch.distributed.init_process_group("nccl")
>>> job = disttrain.Client().submit(fit.job(rate=3e-4))  # or of LocalClient()  # doctest: +SKIP

The function's source travels with the job, and nothing else of the program: pickled code would need the same packages
and the same Python on both sides.
"""

import ast
import builtins
import inspect
import json
import re
import symtable
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

from disttrain.errors import CommandError
from disttrain_api import manifest
from disttrain_api.names import API_VERSION, KIND

P = ParamSpec("P")
R = TypeVar("R")
Raw = dict[str, Any]

SOURCE, ARGUMENTS = "TRAIN_FUNCTION", "TRAIN_ARGUMENTS"
"""Variables of the pods: the program, and what it calls the function with, as JSON."""
MAX_BYTES = 100_000
"""The most bytes of each: Linux gives a process no longer variable than 128 KiB."""
_MAX_NAME = 40
_MAIN = """
if __name__ == "__main__":
    import json
    import os

    _given = json.loads(os.environ["{arguments}"])
    {name}(*_given["args"], **_given["kwargs"])
"""
_START = 'file="${{TMPDIR:-/tmp}}/{name}.py" && printf %s "${source}" > "$file" && exec {program} "$file"'
_KEPT = (int, float, str, bool, type(None))


class TrainFunction(Generic[P, R]):
    """A function that jobs call on each rank. A call of it is a plain call in this process."""

    def __init__(self, function: Callable[P, R], spec: Raw, name: str | None) -> None:
        self._function, self._spec, self._name = function, spec, name
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Raw:
        """Return a job whose ranks call the function so, for `submit` of a client of a cluster or of this machine.

        Raises CommandError where the function uses something outside of it, or an argument is no JSON; ManifestError
        where the job cannot be.
        """
        inspect.signature(self._function).bind(*args, **kwargs)
        source, name = program_of(self._function), self.__name__
        variables = {SOURCE: source, ARGUMENTS: _as_json(args, kwargs)}
        for variable, text in variables.items():
            if len(text.encode()) > MAX_BYTES:
                raise CommandError(f"{name}: {variable} would have {len(text.encode())} bytes; the most is {MAX_BYTES}")
        workers = self._spec["workers"]
        # A kubelet takes $(NAME) for a reference and $$ for a plain $.
        own = [{"name": variable, "value": text.replace("$", "$$")} for variable, text in variables.items()]
        ranks = workers.get("processesPerPod") or workers.get("gpusPerPod") or 1
        program = "torchrun" if ranks > 1 else "python3"
        start = _START.format(name=name, source=SOURCE, program=program)
        workers = {**workers, "command": ["sh", "-c", start], "env": [*workers.get("env", []), *own]}
        begin = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MAX_NAME] or "job"
        metadata = {"name": self._name} if self._name else {"generateName": f"{begin}-"}
        found = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": metadata,
            "spec": {**self._spec, "workers": workers},
        }
        manifest.of_object(found)
        return found


def train(
    *,
    workers: int = 1,
    gpus: int = 0,
    processes: int | None = None,
    image: str | None = None,
    name: str | None = None,
    storage: str | None = None,
    env: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, R]], TrainFunction[P, R]]:
    """Return a decorator that makes jobs of a function, which imports and defines all that it uses within it.

    workers: pods. gpus: GPUs of each; it has as many ranks, or one. processes: ranks of each, where that is not the
    number of its GPUs. image: with Python and what the function imports; absent, the operator's trainer image. name: of
    the job; absent, each one has a name of its own that begins with the function's. storage: size of the claim at
    $DISTTRAIN_STORAGE, where `disttrain.session()` keeps checkpoints, for example "10Gi". env: variables of the ranks.
    spec: further fields of a job's spec, such as `runPolicy`; they are laid over the others.
    """
    roles: Raw = {"replicas": workers}
    roles |= {"gpusPerPod": gpus} if gpus else {}
    roles |= {"processesPerPod": processes} if processes is not None else {}
    roles |= {"image": image} if image is not None else {}
    roles |= {"env": [{"name": key, "value": value} for key, value in env.items()]} if env else {}
    whole: Raw = {"workers": roles}
    if storage is not None:
        claim = {"resources": {"requests": {"storage": storage}}}
        whole["storage"] = {"volumeClaimTemplate": {"spec": claim}}
    further = dict(spec or {})
    whole = {**whole, **further, "workers": {**roles, **further.get("workers", {})}}

    def decorate(function: Callable[P, R]) -> TrainFunction[P, R]:
        if not inspect.isfunction(function) or inspect.isgeneratorfunction(function) or function.__name__ == "<lambda>":
            raise CommandError("disttrain.train makes jobs of plain functions: write @disttrain.train() before a `def`")
        return TrainFunction(function, whole, name)

    return decorate


def program_of(function: Callable[..., object]) -> str:
    """Return a program that calls the function. Raises CommandError where its source does not stand alone."""
    name = getattr(function, "__name__", "")
    try:
        lines = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise CommandError(f"the source of {name} cannot be read: define it in a file or in a notebook") from error
    try:
        node = ast.parse(lines).body[0]
    except SyntaxError as error:
        raise CommandError(f"the source of {name} cannot be read alone: {error.msg}") from error
    if not isinstance(node, ast.FunctionDef):
        raise CommandError(f"{name} is no plain function: found {type(node).__name__}")
    if len(node.decorator_list) > 1:
        raise CommandError(f"{name} has other decorators beside disttrain.train, which a job would not have")
    # Python counts lines by this character alone; str.splitlines knows others, which a text may hold.
    text = "\n".join(lines.split("\n")[node.lineno - 1 : node.end_lineno])
    # Annotations may name what was imported outside: as texts they mean nothing to the program.
    source = f"from __future__ import annotations\n\n{text}\n"
    missing = sorted(
        set(_outside(symtable.symtable(source, name, "exec"))) - {name, "annotations"} - set(dir(builtins))
    )
    if missing:
        what = ", ".join(missing)
        raise CommandError(
            f"{name} uses {what} from outside: ranks have its source alone; import or define it within it"
        )
    return source + "\n" + _MAIN.format(arguments=ARGUMENTS, name=name)


def _outside(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that code reads."""
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced())
    for child in table.get_children():
        yield from _outside(child)


def _as_json(args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    for where, value in [*enumerate(args), *kwargs.items()]:
        if not _is_plain(value):
            raise CommandError(
                f"argument {where} is {type(value).__name__}: expected numbers, texts, booleans, None, and lists and"
                " dictionaries of these"
            )
    return json.dumps({"args": list(args), "kwargs": dict(kwargs)}, allow_nan=True)


def _is_plain(value: object) -> bool:
    """Whether a value comes back from JSON as it was."""
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(entry) for key, entry in value.items())
    return type(value) in _KEPT
