"""A folder with an adapter to begin with, as Hugging Face's peft writes it: the config of it, and its tensors."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import InvalidConfiguration

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def is_adapter_folder(path: Place) -> bool:
    """Whether there is an adapter on this machine."""
    try:
        return isinstance(path, Path) and (path / ADAPTER_CONFIG).is_file()
    except OSError:
        return False


def base_weights(module: nn.Module, folder: Path) -> str:
    """Return the place of the weights that the adapter adapts. Raises InvalidConfiguration where this model does not
    continue it.
    """
    base_of = offered(module, "base_of_adapter")
    if base_of is None:
        raise InvalidConfiguration(
            f"`training.checkpoint.initialFrom` names an adapter, {folder}, which only a model of `transformers` with "
            "`training.model.config.lora` continues"
        )
    if not (folder / ADAPTER_FILE).is_file():
        raise InvalidConfiguration(
            f"`training.checkpoint.initialFrom`: {folder} holds {ADAPTER_CONFIG} and no {ADAPTER_FILE}: write the "
            "adapter with peft's `save_pretrained`, which writes that file"
        )
    return str(base_of(folder))
