"""A trained model of transformers as a folder that the library's `from_pretrained` reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from disttrain_api.transformers_config import LoraConfig, TransformersConfig
from disttrain_trainer.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from disttrain_trainer.checkpoint.export import Piece, StoredModel, export_folder
from disttrain_trainer.checkpoint.safetensors_writer import SHARD_BYTES
from disttrain_trainer.models.transformers.adapter_files import PEFT_PREFIX
from disttrain_trainer.models.transformers.config import CONFIG_FILE, library_config, reaches
from disttrain_trainer.models.transformers.expert_files import ExpertFiles
from disttrain_trainer.models.transformers.families import FAMILIES
from disttrain_trainer.models.transformers.lora import is_adapter, merged
from disttrain_trainer.runtime.errors import InvalidConfiguration

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
GENERATION_FILE = "generation_config.json"
_MAX_TOKENIZER_BYTES = 200_000_000
_HEAD = "lm_head.weight"
_ALL = sys.maxsize


def export_model(
    model: StoredModel,
    given: TransformersConfig,
    target: Path,
    beside: Mapping[str, Path] = MappingProxyType({}),
    most: int = SHARD_BYTES,
) -> None:
    """Write the model into the folder `target`: safetensors files, `config.json`, and other files beside them.

    Adapters are merged into what they adapt. beside: files by name; most: bytes of a safetensors file.
    Raises InvalidConfiguration, CheckpointBroken or OSError.
    """
    config = library_config(given)
    family = FAMILIES[config.model_type]
    pieces = _pieces(model, given, tied=bool(config.tie_word_embeddings), files=family.experts)
    config.architectures = [f"{family.prefix}ForCausalLM"]
    # `from_pretrained` takes the format that stands here, whatever the files have.
    config.dtype = model.describe(pieces[0]).dtype
    # Programs that serve the model take the longest input from here.
    if given.sequence_length is not None:
        config.max_position_embeddings = reaches(config, given.sequence_length)
    text = (config.to_json_string(use_diff=False) + "\n").encode()
    export_folder(model, pieces, target, {CONFIG_FILE: text, **beside}, most)


def export_adapter(model: StoredModel, given: TransformersConfig, target: Path) -> None:
    """Write the LoRA adapter alone into the folder `target`, as peft reads it.

    Raises InvalidConfiguration, CheckpointBroken or OSError.
    """
    lora = _lora_of(model, given)
    if lora is None:
        raise InvalidConfiguration(f"{model.source} has no adapters: `training.model.config.lora` was not given")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": given.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    pieces = [Piece(PEFT_PREFIX + name, (name,)) for name in model.names if is_adapter(name)]
    text = (json.dumps(described, indent=2) + "\n").encode()
    export_folder(model, pieces, target, {ADAPTER_CONFIG: text}, _ALL, ADAPTER_FILE)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return those of TOKENIZER_FILES that a folder has. Raises InvalidConfiguration for one that is none."""
    found = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    for path in found.values():
        if path.stat().st_size > _MAX_TOKENIZER_BYTES:
            raise InvalidConfiguration(f"{path} has more than {_MAX_TOKENIZER_BYTES} bytes, which no tokenizer has")
    return found


def _pieces(model: StoredModel, given: TransformersConfig, *, tied: bool, files: ExpertFiles | None) -> list[Piece]:
    """Return what the library expects in the files: a head that is the embeddings is not in them.

    files: how they hold experts.
    """
    lora = _lora_of(model, given)
    names = [name for name in model.names if not is_adapter(name) and not (tied and name == _HEAD)]
    pieces = [Piece(name, (name,)) if lora is None else _merged_piece(name, model, lora) for name in names]
    return pieces if files is None else [part for piece in pieces for part in _as_in_files(piece, model, files)]


def _as_in_files(piece: Piece, model: StoredModel, files: ExpertFiles) -> Iterator[Piece]:
    """Yield the tensors that stand for a piece in the files of a family with experts."""
    shape = model.describe(piece).shape
    for name, part in files.names(piece.name, shape[0]):
        if part is None:
            yield replace(piece, name=name)
        else:
            yield Piece(name, piece.reads, part.of, part.shape(shape))


def _merged_piece(name: str, model: StoredModel, lora: LoraConfig) -> Piece:
    owner = name.removesuffix(".weight")
    parts = (name, f"{owner}.lora_A.weight", f"{owner}.lora_B.weight")
    if parts[1] not in model.names:
        return Piece(name, (name,))
    return Piece(name, parts, lambda tensors: merged(tensors[0], tensors[1], tensors[2], lora))


def _lora_of(model: StoredModel, given: TransformersConfig) -> LoraConfig | None:
    """Return how the checkpoint's adapters count; None where it has none."""
    if not any(is_adapter(name) for name in model.names):
        return None
    if given.lora is None:
        raise InvalidConfiguration(
            f"{model.source} has adapters: give the manifest of the job with `training.model.config.lora`"
        )
    return given.lora
