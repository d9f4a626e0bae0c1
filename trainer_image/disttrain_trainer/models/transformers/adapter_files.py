"""An adapter as peft writes it, of which a job's own adapters are the continuation: refused where they would not be.

What of `adapter_config.json` changes the computation must be what the manifest says. A field that is not known here
must have nothing in it: variants of LoRA are switched on by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from disttrain_api.transformers_config import LoraConfig
from disttrain_trainer.checkpoint.adapter import ADAPTER_CONFIG
from disttrain_trainer.checkpoint.file_part import FilePart
from disttrain_trainer.models.transformers.config import MAX_CONFIG_BYTES
from disttrain_trainer.runtime.errors import InvalidConfiguration, shown
from disttrain_trainer.runtime.files import read_linked

PEFT_PREFIX = "base_model.model."
"""Begins the name of each tensor in peft's files."""
_FIELD = "`training.model.config.lora`"
_WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision",
)  # fmt: skip
"""Fields that change nothing of what an adapter computes, where no other field does."""
_COMPARED = ("r", "lora_alpha", "target_modules")
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin that leave the base as it is."""


def base_of_adapter(folder: Path, lora: LoraConfig | None, path: str | None) -> str:
    """Return the folder with the weights that the adapter in `folder` adapts: `path`, that of the model, where there is
    one. Raises InvalidConfiguration for an adapter that is not continued by those that `lora` describes.
    """
    written = _read(folder)
    _require_plain(folder, written)
    rank, alpha, targets = _described(folder, written)
    expected = f"{{rank: {rank}, alpha: {alpha:g}, targets: [{', '.join(targets)}]}}"
    if lora is None:
        raise InvalidConfiguration(
            f"{_FIELD} is not given, but `training.checkpoint.initialFrom` names an adapter, {folder}: write {expected}"
        )
    for name, found, wanted in (
        ("rank", lora.rank, rank),
        ("alpha", lora.alpha, alpha),
        ("targets", sorted(set(lora.targets)), targets),
    ):
        if found != wanted:
            raise InvalidConfiguration(
                f"{_FIELD[:-1]}.{name}` is {_text(found)}, but the adapter {folder} has {_text(wanted)}: write "
                f"{expected}"
            )
    return _base(folder, written.get("base_model_name_or_path"), path)


def part_in_adapter(name: str) -> FilePart:
    """Return the parameter that a tensor of an adapter's file is."""
    return FilePart(name.removeprefix(PEFT_PREFIX))


def _read(folder: Path) -> Mapping[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        found = from_json(read_linked(file, MAX_CONFIG_BYTES), allow_inf_nan=False)
    except OSError as error:
        raise InvalidConfiguration(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidConfiguration(f"{file} is no JSON: {shown(str(error))}") from error
    if not isinstance(found, dict):
        raise InvalidConfiguration(f"{file} holds no JSON object, expected the config of an adapter")
    return found


def _require_plain(folder: Path, written: Mapping[str, Any]) -> None:
    for name, value, wanted in _unlike(written):
        raise InvalidConfiguration(
            f"{folder / ADAPTER_CONFIG}: `{shown(name):.60}` is {shown(str(value)):.100}, expected {wanted}: adapters "
            "are continued that have nothing but the two matrices of LoRA beside each target"
        )


def _unlike(written: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields that change the computation: name, value, what is expected."""
    allowed: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none",),
        "init_lora_weights": _INITIAL,
    }
    for name, values in allowed.items():
        if (found := written.get(name, values[0])) not in values:
            yield name, found, " or ".join(map(str, values))
    for name, value in written.items():
        # Empty or false: this variant is not used.
        if value and name not in (*allowed, *_WITHOUT_EFFECT, *_COMPARED):
            yield name, value, "none"


def _described(folder: Path, written: Mapping[str, Any]) -> tuple[int, float, list[str]]:
    """Return rank, alpha and targets."""
    rank, alpha, targets = (written.get(name) for name in _COMPARED)
    if type(rank) is not int or type(alpha) not in (int, float):
        raise InvalidConfiguration(
            f"{folder / ADAPTER_CONFIG}: `r` is {shown(str(rank)):.60} and `lora_alpha` {shown(str(alpha)):.60}, "
            "expected two numbers"
        )
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise InvalidConfiguration(
            f"{folder / ADAPTER_CONFIG}: `target_modules` is {shown(str(targets)):.100}, expected a list of "
            "projections such as q_proj: write those that the adapter has"
        )
    # The tensors in the file say whether it is all layers that have them.
    return rank, float(alpha), sorted({shown(target.rpartition(".")[2])[:63] for target in targets})


def _base(folder: Path, named: object, path: str | None) -> str:
    # A name of the Hub says nothing of a folder on this machine: there the shapes alone are compared.
    trained_on = Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None
    if path is None and trained_on is None:
        raise InvalidConfiguration(
            f"`training.model.config.path` is not given, and what the adapter {folder} was trained on, "
            f"{shown(str(named)):.200}, is no folder here: name the folder of that model in `path`"
        )
    if path is None:
        return str(trained_on)
    if trained_on is not None and not trained_on.samefile(path):
        raise InvalidConfiguration(
            f"`training.model.config.path` is {path}, but the adapter {folder} was trained on "
            f"{shown(str(named)):.200}: name that folder, or correct `base_model_name_or_path` in {ADAPTER_CONFIG}"
        )
    return path


def _text(value: object) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else f"{value:g}"
