"""Packages that only some verbs need: `pip install disttrain` brings what is needed to work with a cluster."""

from importlib.util import find_spec

from disttrain.errors import CommandError

# Top-level module -> the extra that brings it.
_EXTRAS = {
    **dict.fromkeys(("matplotlib", "numpy", "safetensors", "sklearn", "torch", "zmq"), "local"),
    **dict.fromkeys(("pyarrow", "sentencepiece", "tokenizers"), "data"),
    **dict.fromkeys(("peft", "transformers"), "hf"),
    "s3fs": "s3",
}
TORCH = ("torch",)


def lacking(modules: tuple[str, ...] = TORCH) -> str | None:
    """Return which of the modules is not installed, with the command that installs it; None: all are."""
    missing = next((name for name in modules if find_spec(name) is None), None)
    return None if missing is None else _sentence(missing)


def require(what: str, modules: tuple[str, ...] = TORCH) -> None:
    """Raise CommandError where one of the modules is not installed. what: the begin of the sentence."""
    found = lacking(modules)
    if found is not None:
        raise CommandError(f"{what}: {found}")


def sentence_of(error: ModuleNotFoundError) -> str | None:
    """Return the same of an import that failed; None where no extra brings the module: it is a defect."""
    name = (error.name or "").partition(".")[0]
    return _sentence(name) if name in _EXTRAS else None


def _sentence(name: str) -> str:
    return f"the package {name} is not installed here: pip install 'disttrain[{_EXTRAS[name]}]'"
