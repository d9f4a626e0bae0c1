"""`package.module:function` of the user: imported, checked, called."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disttrain_trainer.runtime.errors import EntrypointNotImportable, InvalidConfiguration, one_line


def call_entrypoint(field: str, entrypoint: str, config: dict[str, Any]) -> Any:
    """What the function returns for `config` as keyword arguments.

    `field` is the manifest's path of model or data, for messages.
    Raises EntrypointNotImportable where the name leads nowhere, InvalidConfiguration where the arguments do not fit.
    """
    function = _import(f"`{field}.entrypoint`", entrypoint)
    try:
        inspect.signature(function).bind(**config)
    except TypeError as error:
        raise InvalidConfiguration(
            f"`{field}.config` does not fit {entrypoint}{inspect.signature(function)}: {error}"
        ) from error
    return function(**config)


def _import(field: str, entrypoint: str) -> Callable[..., Any]:
    module_name, _, name = entrypoint.partition(":")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
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
        raise EntrypointNotImportable(f"{field}: '{name}' in {module.__file__} is {found}, expected a function")
    return function
