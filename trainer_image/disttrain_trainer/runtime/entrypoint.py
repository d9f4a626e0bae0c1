"""`package.module:function` of the user: imported, checked, called."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from disttrain_trainer.runtime.errors import EntrypointNotImportable, InvalidConfiguration, one_line


def call_entrypoint(field: str, entrypoint: str, config: dict[str, Any]) -> Any:
    """Return the result of the function for `config` as keyword arguments.

    `field` is the manifest's path of model or data, for messages.
    Raises EntrypointNotImportable where the name leads nowhere, InvalidConfiguration where the arguments do not fit.
    """
    with _working_folder():
        function = _import(f"`{field}.entrypoint`", entrypoint)
        try:
            inspect.signature(function).bind(**config)
        except TypeError as error:
            raise InvalidConfiguration(
                f"`{field}.config` does not fit {entrypoint}{inspect.signature(function)}: {error}"
            ) from error
        return function(**config)


def import_entrypoint(field: str, entrypoint: str) -> Callable[..., Any]:
    """Return what the name leads to. Raises EntrypointNotImportable."""
    with _working_folder():
        return _import(f"`{field}.entrypoint`", entrypoint)


def _import(field: str, entrypoint: str) -> Callable[..., Any]:
    module_name, _, name = entrypoint.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if not isinstance(error, ImportError):
            traceback.print_exc()
        raise EntrypointNotImportable(
            f"{field}: importing '{module_name}' raised {type(error).__name__}: {one_line(error)}; "
            f"Python looked in {Path.cwd()} and its installed packages"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "nothing" if function is None else f"a {type(function).__name__}"
        raise EntrypointNotImportable(f"{field}: '{name}' in {_place_of(module)} is {found}, expected a function")
    return function


def _place_of(module: ModuleType) -> str:
    if getattr(module, "__file__", None):
        return str(module.__file__)
    if (folders := list(getattr(module, "__path__", []))) != []:
        return f"{folders[0]}, a folder without __init__.py,"
    return f"Python's built-in module '{module.__name__}', which hides a file of that name,"


@contextmanager
def _working_folder() -> Iterator[None]:
    """Inside, Python looks into the working folder first, as for a script there; afterwards last.

    A rank is started without it (-P): a file of the user's that is called as a module of Python's, or of a package that
    the trainer or torch imports some time, hides none from these. Only what is imported inside finds such a file first.
    """
    folder = str(Path.cwd())
    if "" in sys.path or folder in sys.path[:-1]:
        # Where whoever has started this process put it.
        yield
        return
    hidden = {name: sys.modules.pop(name) for name in _hidden_by(folder)}
    own = _found_first.setdefault(folder, {})
    sys.modules.update(own)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    try:
        yield
    finally:
        sys.path[:] = [*(path for path in sys.path if path != folder), folder]
        own.update({name: sys.modules[name] for name in hidden if name in sys.modules})
        sys.modules.update(hidden)


_found_first: dict[str, dict[str, ModuleType]] = {}
"""By folder, modules of the user's that are called as some of Python's which are imported: each is imported once."""


def _hidden_by(folder: str) -> list[str]:
    """Return the modules of Python's library that are imported, and that the folder has files of the names of."""
    there = {path.stem for path in Path(folder).glob("*.py")}
    return sorted(there & sys.stdlib_module_names & sys.modules.keys() - set(sys.builtin_module_names) - {"__main__"})
