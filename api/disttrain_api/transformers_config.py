"""`config` of the model `transformers`: a model of Hugging Face's library, described as the library describes it."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from disttrain_api.base import ApiModel
from disttrain_api.training import Fraction

Size = Annotated[int, Field(ge=1, le=1_000_000)]

FAMILIES = ("granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""`model_type` of the families whose layers are composed as the library composes them."""
EXPERTS = {"mixtral": ("num_local_experts",), "qwen3_moe": ("num_experts", "num_local_experts")}
"""The families with experts, with the fields that say how many there are."""
_PATH = "training.model.config"
_WHOLE = TypeAdapter(Annotated[StrictInt, Field(ge=1)])

Problem = tuple[str, str]
"""(field path below `spec`, sentence)."""


class LoraConfig(ApiModel):
    """Low-rank adapters (Hu et al. 2021): matrices beside the targets are trained, the model itself stays as it is."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Width of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 16.0
    """An adapter's output counts alpha / rank times."""
    targets: Annotated[
        list[Annotated[str, Field(pattern="^[a-z_]+_proj$", max_length=63)]], Field(min_length=1, max_length=16)
    ] = ["q_proj", "v_proj"]
    """Projections of every layer that get one, as the library names them."""
    dropout: Fraction = 0.0
    """Probability of zeroing an adapter's input."""


class TransformersConfig(ApiModel):
    """A causal language model of Hugging Face's transformers, by a config: in a folder, or written out here."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A folder with a `config.json`. Its weights are read where `training.checkpoint.initialFrom` names it, too."""
    config: dict[str, Any] | None = None
    """What a `config.json` holds, `model_type` included."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the model. Absent: all of the model is trained."""
    sequence_length: Size | None = None
    """Longest sequence, in tokens. Absent: that of the built-in data."""


def size_of(config: TransformersConfig, name: str) -> int | None:
    """Return a size that is written out in the manifest, None where it is the library's default or in a file."""
    try:
        return _WHOLE.validate_python((config.config or {}).get(name))
    except ValidationError:
        return None


def transformers_problems(config: TransformersConfig) -> Iterator[Problem]:
    """Return the problems of the config by itself."""
    if (config.path is None) == (config.config is None):
        yield _PATH, "exactly one of `path` and `config` must be given"
    elif config.config is not None and config.config.get("model_type") not in FAMILIES:
        found = str(config.config.get("model_type", "nothing"))[:80]
        yield f"{_PATH}.config.model_type", f"must be one of {', '.join(FAMILIES)}, found '{found}'"


def experts_of(config: TransformersConfig) -> tuple[str, int | None] | None:
    """Return the name and the number of the experts of each layer, None for a number that is the library's default;
    None for a family without experts, or where only the trainer knows."""
    names = EXPERTS.get(str((config.config or {}).get("model_type")))
    if names is None:
        return None
    return next(((name, size) for name in names if (size := size_of(config, name)) is not None), (names[0], None))


def adapter_problems(config: TransformersConfig) -> Iterator[Problem]:
    """Return the problems of the adapters in a tensor group of several ranks."""
    if config.lora is not None and config.lora.dropout > 0:
        yield f"{_PATH}.lora.dropout", "conflicts with `tensorParallelDegree`: remove one of the two"


def layers_of(config: TransformersConfig) -> tuple[int, int] | None:
    """Return how many layers have parameters to train and how many there are; None where the manifest does not say."""
    blocks = size_of(config, "num_hidden_layers")
    if blocks is None:
        return None
    # Embeddings stand before the blocks, a normalisation and the head behind; Granite's scale the first and the last.
    scaled = ((config.config or {}).get(name, 1.0) != 1.0 for name in ("embedding_multiplier", "logits_scaling"))
    return blocks if config.lora is not None else blocks + 3, blocks + 3 + sum(scaled)
