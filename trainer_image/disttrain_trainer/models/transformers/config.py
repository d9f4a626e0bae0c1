"""The library's config of a model: read from a folder or from the manifest, and refused where we would compute else.

What the library computes from its input's length or differently in each layer is refused by name: composed of layers,
the model would silently be another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.models.transformers.families import FAMILIES
from disttrain_trainer.runtime.errors import InvalidConfiguration, one_line, shown
from disttrain_trainer.runtime.files import read_linked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 1_000_000
_FIELD = "`training.model.config`"
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
_SIZES = {
    "num_hidden_layers": 1000,
    "hidden_size": 1_000_000,
    "intermediate_size": 1_000_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "vocab_size": 10_000_000,
}
"""The largest of each."""
_EXPERT_SIZES = {"num_local_experts": 10_000, "num_experts_per_tok": 10_000, "moe_intermediate_size": 1_000_000}
"""The same of families with experts."""
_ATTENTION = ("full_attention", "sliding_attention")


def library_config(given: TransformersConfig) -> PreTrainedConfig:
    """Return the library's config. Raises InvalidConfiguration where it cannot be read or is none of FAMILIES."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise InvalidConfiguration(
            "`training.model.name` transformers: the library is not in the image; install `disttrain[hf]`"
        ) from error
    written = given.config if given.config is not None else read_config_file(Path(given.path or ""))
    kind = written.get("model_type")
    if kind not in FAMILIES:
        found = f"`{shown(str(kind))}`" if kind is not None else "none"
        raise InvalidConfiguration(
            f"{_FIELD}: model_type must be one of {', '.join(sorted(FAMILIES))}, found {found}; the layers of other "
            "families are not composed here: write an entry point"
        )
    family, described = FAMILIES[kind], CONFIG_MAPPING[kind]
    _require_sizes({name: written[name] for name in _SIZES if written.get(name) is not None})
    try:
        if given.config is not None:
            # The library takes every name, so a misspelt one would leave the default without a word.
            _require_known(written, {*described().to_dict(), *described.attribute_map, *family.fields})
        config = described.from_dict(dict(written))
    except InvalidConfiguration:
        raise
    except Exception as error:
        raise InvalidConfiguration(f"{_FIELD}: {kind} cannot be described so: {one_line(error)}") from error
    _require_sizes({name: getattr(config, name, None) for name in _SIZES})
    _require_composable(config)
    if family.experts is not None:
        _require_routable(config)
    config._attn_implementation = "sdpa"
    return config


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return what a folder's `config.json` holds. Raises InvalidConfiguration."""
    file = folder / CONFIG_FILE
    try:
        text = read_linked(file, MAX_CONFIG_BYTES)
    except OSError as error:
        raise InvalidConfiguration(f"{_FIELD}: {file} cannot be read: {error.strerror or error}") from error
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidConfiguration(f"{_FIELD}: {file} is no JSON: {shown(str(error))}") from error
    if not isinstance(found, dict):
        raise InvalidConfiguration(f"{_FIELD}: {file} holds no JSON object, expected the config of a model")
    return found


def _require_known(written: dict[str, Any], known: Collection[str]) -> None:
    # Names of earlier releases, which the library still reads.
    earlier = {"rope_theta", "rope_scaling", "torch_dtype", "architectures"}
    for name in written:
        if name not in known and name not in earlier:
            raise InvalidConfiguration(
                f"{_FIELD}.config: `{shown(name)}` is no field of a {written['model_type']}; expected one of "
                f"{', '.join(sorted(known))}"
            )


def _require_sizes(sizes: Mapping[str, object]) -> None:
    """Sizes are used before anything could say what is wrong with them."""
    for name, found in sizes.items():
        most = (_SIZES | _EXPERT_SIZES)[name]
        if type(found) is not int or not 1 <= found <= most:
            raise InvalidConfiguration(
                f"{_FIELD}: {name} must be a whole number from 1 to {most}, found `{shown(str(found))}`"
            )


def _require_composable(config: PreTrainedConfig) -> None:
    kind = config.model_type
    rotary = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rotary.values()):
        raise InvalidConfiguration(
            f"{_FIELD}: the rotary embeddings of this {kind} differ by layer (rope_parameters), which is not composed "
            "here: write an entry point"
        )
    if (rotary_type := rotary.get("rope_type", "default")) not in _STATIC_ROTARY:
        raise InvalidConfiguration(
            f"{_FIELD}: rope_type `{shown(str(rotary_type))}` depends on the length of each input, expected one of "
            f"{', '.join(_STATIC_ROTARY)}"
        )
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _ATTENTION:
            raise InvalidConfiguration(
                f"{_FIELD}: layer_types has `{shown(str(layer_type))}`, expected {' or '.join(_ATTENTION)}"
            )
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidConfiguration(f"{_FIELD}: quantised weights cannot be trained: remove quantization_config")


def _require_routable(config: PreTrainedConfig) -> None:
    """Raises InvalidConfiguration for experts that the trainer's layer would not compute as the library."""
    _require_sizes({name: getattr(config, name) for name in _EXPERT_SIZES if hasattr(config, name)})
    if config.num_experts_per_tok > config.num_local_experts:
        raise InvalidConfiguration(
            f"{_FIELD}: num_experts_per_tok {config.num_experts_per_tok} must be less than or equal to the number of "
            f"experts, which is {config.num_local_experts}"
        )
    if noise := getattr(config, "router_jitter_noise", 0):
        raise InvalidConfiguration(
            f"{_FIELD}: router_jitter_noise {noise} is not composed here, since ranks that share tokens would draw "
            "different noise: set it to 0"
        )


def reaches(config: PreTrainedConfig, length: int) -> int:
    """Return how many positions a model has that was trained with sequences of this length."""
    declared: int = getattr(config, "max_position_embeddings", length)
    # The factor of these rotary embeddings is then the quotient of two lengths: with another one they are others.
    derived = (getattr(config, "rope_parameters", None) or {}).get("factor", 1.0) is None
    return declared if derived else max(declared, length)


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """Return how many tokens each layer looks at, the own one included; None: all before it."""
    layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
