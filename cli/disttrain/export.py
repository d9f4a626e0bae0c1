"""`disttrain export CHECKPOINT TARGET`: a trained model as files in common formats."""

from pathlib import Path

import torch

from disttrain.errors import USAGE, CommandError
from disttrain.output import print_stderr, show
from disttrain.validate import given
from disttrain_api.builtin import data_config, model_config
from disttrain_api.chat import ChatConfig
from disttrain_api.errors import ManifestError
from disttrain_api.lines import LinesConfig
from disttrain_api.training import ModelName, Training
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
    from disttrain_trainer.transformers_export import export_adapter, export_model

    training = None if model.is_dir() else _training_of(model)
    config = TransformersConfig(path=str(model)) if training is None else _config_of(training, model)
    if adapter:
        export_adapter(stored, config, target)
    else:
        own = [] if config.path is None else [Path(config.path)]
        named = [*own, *_tokenizers_of_data(training)] if tokenizer is None else [tokenizer]
        export_model(stored, config, target, _files_beside(own, named, required=tokenizer is not None))
    return stored.others


def _files_beside(own: list[Path], tokenizers: list[Path], *, required: bool) -> dict[str, Path]:
    """Return the files of the first of the tokenizers that there is, and what `generate` reads, by name.

    own: the model's folder. Raises CommandError where there must be a tokenizer and is none.
    """
    from disttrain_trainer.transformers_export import GENERATION_FILE, tokenizer_files

    found = next((folder for folder in tokenizers if tokenizer_files(folder)), None)
    places = ", ".join(map(str, tokenizers))
    if found is None and required:
        raise CommandError(f"{places} has no files of a tokenizer, expected tokenizer.json or the like")
    if found is None:
        print_stderr(f"no tokenizer was found{places and f' in {places}'}: --tokenizer FOLDER copies one")
    folders = own if found is None else [*own, found]
    generation = [file for folder in folders if (file := folder / GENERATION_FILE).is_file()]
    files = {} if found is None else tokenizer_files(found)
    return files | {file.name: file for file in generation[:1]}


def _training_of(manifest: Path) -> Training:
    try:
        training = given(str(manifest)).spec.training
    except ManifestError as error:
        raise CommandError(str(error)) from error
    if training is None or (training.task is None and training.model.name is not ModelName.TRANSFORMERS):
        raise CommandError(f"{manifest}: `training.model.name` must be transformers to export a folder for it")
    return training


def _config_of(training: Training, manifest: Path) -> TransformersConfig:
    """Return the model config of a manifest. Raises CommandError, TrainerError."""
    if training.task is None:
        config = model_config(training)
        assert isinstance(config, TransformersConfig)
        return config
    found = OwnedTask(training.task, training.optimizer).transformers_config()
    if found is None:
        raise CommandError(
            f"{manifest}: {training.task.entrypoint} has no method transformers_config(), which says of what the "
            "model is built"
        )
    return found


def _tokenizers_of_data(training: Training | None) -> list[Path]:
    """Return the folder of the tokenizer that a manifest's data name, if they name one."""
    if training is None or training.data.name is None:
        return []
    config = data_config(training.data)
    named = config.tokenizer if isinstance(config, ChatConfig | LinesConfig) else None
    return [] if named is None else [Path(named)]
