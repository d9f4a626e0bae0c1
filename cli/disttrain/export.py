"""`disttrain export CHECKPOINT TARGET`: a trained model as files in common formats."""

from pathlib import Path

import torch

from disttrain.errors import USAGE, CommandError
from disttrain.output import print_stderr, show
from disttrain.validate import given
from disttrain_api.builtin import model_config
from disttrain_api.errors import ManifestError
from disttrain_api.training import ModelName
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.checkpoint.export import StoredModel, export_weights
from disttrain_trainer.checkpoint.safetensors_file import SUFFIX
from disttrain_trainer.runtime.errors import TrainerError
from disttrain_trainer.runtime.object_path import ObjectPath
from disttrain_trainer.tasks.own import OwnedTask

SAME = "same"
FORMATS = (SAME, "float32", "bfloat16", "float16")
"""Number formats of the files that are written; SAME: that of each tensor in the checkpoint."""


def export(
    checkpoint: Path | ObjectPath,
    target: Path,
    model: Path | None = None,
    tokenizer: Path | None = None,
    *,
    adapter: bool = False,
    averaged: bool = False,
    dtype: str = SAME,
) -> int:
    """Write one file, or with `model` a folder for transformers, and say so. Raises CommandError.

    adapter: the LoRA adapter alone, as peft reads it. averaged: with the averages of the parameters in their place.
    dtype: one of FORMATS.
    """
    if dtype not in FORMATS:
        raise CommandError(f"--dtype is '{dtype:.60}', expected {', '.join(FORMATS)}", USAGE)
    number_format = None if dtype == SAME else getattr(torch, dtype)
    if checkpoint.suffix == SUFFIX:
        raise CommandError(f"{checkpoint} is a {SUFFIX} file already; name a checkpoint", USAGE)
    if model is None and target.suffix != SUFFIX:
        raise CommandError(
            f"{target} must end with {SUFFIX}; for a folder that transformers reads, give --model",
            USAGE,
        )
    try:
        if model is None:
            left_out = export_weights(checkpoint, target, averaged=averaged, dtype=number_format)
        else:
            stored = StoredModel(checkpoint, averaged=averaged, dtype=number_format)
            left_out = _export_folder(stored, target, model, tokenizer, adapter)
    except (TrainerError, OSError) as error:
        raise CommandError(str(error)) from error
    if left_out:
        print_stderr(f"left out, since they are no tensors: {', '.join(left_out)}")
    files = [target] if target.is_file() else list(target.iterdir())
    show(f"{target}: {sum(file.stat().st_size for file in files)} bytes")
    return 0


def _export_folder(stored: StoredModel, target: Path, model: Path, tokenizer: Path | None, adapter: bool) -> list[str]:
    from disttrain_trainer.transformers_export import export_adapter, export_model, tokenizer_files

    config = _config_of(model)
    if adapter:
        export_adapter(stored, config, target)
    else:
        found = tokenizer_files(tokenizer or model)
        if tokenizer is not None and not found:
            raise CommandError(f"{tokenizer} has no files of a tokenizer, expected tokenizer.json or the like")
        export_model(stored, config, target, found)
    return stored.others


def _config_of(model: Path) -> TransformersConfig:
    """Return the model config of a folder with a `config.json`, or of a manifest. Raises CommandError, TrainerError."""
    if model.is_dir():
        return TransformersConfig(path=str(model))
    try:
        training = given(str(model)).spec.training
    except ManifestError as error:
        raise CommandError(str(error)) from error
    if training is not None and training.task is not None:
        found = OwnedTask(training.task, training.optimizer).transformers_config()
        if found is None:
            raise CommandError(
                f"{model}: {training.task.entrypoint} has no method transformers_config(), which says of what the "
                "model is built"
            )
        return found
    if training is None or training.model.name is not ModelName.TRANSFORMERS:
        raise CommandError(f"{model}: `training.model.name` must be transformers to export a folder for it")
    config = model_config(training)
    assert isinstance(config, TransformersConfig)
    return config
