"""`config` of the built-in models and data sets, and which of them go together.

A model's sizes that follow from the data may be left out with built-in data; `model_config` fills them in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field, ValidationError

from disttrain_api import sentences
from disttrain_api.base import ApiModel
from disttrain_api.chat import ChatConfig
from disttrain_api.corpus import CorpusConfig, corpus_problems
from disttrain_api.lines import LinesConfig
from disttrain_api.training import Data, DataName, Fraction, Model, ModelName, Training
from disttrain_api.transformers_config import Problem, Size, TransformersConfig, size_of, transformers_problems

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
HeldOutFraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]

BYTE_VALUES = 256
DIGITS_SHAPE = (1, 8, 8)
DIGITS_CLASSES = 10
EXPERTS_PER_TOKEN = 2


class MlpConfig(ApiModel):
    """Fully connected layers with ReLU between them; the input is flattened."""

    hidden_sizes: Annotated[list[Size], Field(max_length=100)] = [128]
    """Width of each hidden layer."""
    dropout: Fraction = 0.0
    """Probability of zeroing a hidden unit."""
    input_size: Size | None = None
    """Numbers per sample. Absent: those of the built-in data."""
    output_size: Size | None = None
    """Classes, or numbers to predict. Absent: the classes of the built-in data."""


class NormName(StrEnum):
    """Normalisation layers."""

    GROUP = "Group"
    BATCH = "Batch"


class ResnetConfig(ApiModel):
    """A small residual network."""

    width: Annotated[int, Field(ge=8, le=4096, multiple_of=8)] = 32
    """Channels of the first stage; each further stage has twice as many and half the image."""
    blocks: Annotated[list[Size], Field(min_length=1, max_length=6)] = [1, 1]
    """Residual blocks of each stage."""
    norm: NormName = NormName.GROUP
    """Group looks at one sample at a time, so that every layout computes the same. Batch looks at a microbatch of a
    replica; with `parallelism.dataParallel.syncBatchNorm`, of all replicas."""
    input_channels: Size | None = None
    """Channels of an image. Absent: those of the built-in data."""
    output_size: Size | None = None
    """Classes, or numbers to predict. Absent: the classes of the built-in data."""


class Activation(StrEnum):
    """The function between the two layers of a feed-forward network."""

    GELU_TANH = "GeluTanh"
    GELU = "Gelu"


class GptConfig(ApiModel):
    """A decoder-only transformer (GPT-2's shape). GPT-2 124M: 12 layers, 12 heads, width 768, vocabulary 50304."""

    vocabulary_size: Size = BYTE_VALUES
    """Different tokens; 256 for bytes."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 4
    """Transformer blocks."""
    heads: Annotated[int, Field(ge=1, le=1000)] = 4
    """Attention heads; must divide the width."""
    width: Size = 128
    """Size of the residual stream."""
    sequence_length: Size | None = None
    """Longest sequence, in tokens. Absent: that of the built-in data."""
    dropout: Fraction = 0.0
    """Probability of zeroing, after embeddings, attention and feed-forward layers."""
    tie_weights: bool = True
    """Whether the output layer is the token embedding, as in GPT-2."""
    bias: bool = True
    """Whether linear and normalisation layers have biases, as in GPT-2; many later models have none."""
    activation: Activation = Activation.GELU_TANH
    """Used in feed-forward layers. GeluTanh approximates GELU, as in GPT-2; Gelu is exact, and faster on CPUs."""
    experts: Annotated[int, Field(ge=2, le=10_000)] | None = None
    """Feed-forward networks of each block, of which a router picks some for each token. Absent: one, without router."""
    experts_per_token: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """With experts: how many compute a token. Absent: 2."""
    capacity_factor: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    """With experts: in training each takes at most this multiple of its even share of a microbatch. Absent: all."""
    auxiliary_loss_weight: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] | None = None
    """With experts: weight of the load-balancing loss. Absent: 0.01."""
    z_loss_weight: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] | None = None
    """With experts: weight of the router's z-loss. Absent: 0.001."""


class DigitsConfig(ApiModel):
    """scikit-learn's 1,797 handwritten digits, 1 x 8 x 8, scaled to 0..1. The split keeps the share of each class."""

    held_out_fraction: HeldOutFraction = 0.2
    """Part that is kept for evaluation."""
    split_seed: Seed = 0
    """Seed of the split; apart from `seed`, so that runs can be compared."""


class TextConfig(ApiModel):
    """Bytes of text files, cut into sequences, each predicting its next byte."""

    paths: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=1000)] = []
    """Files, and folders whose files are read recursively. Absent: the top-level *.py files of
    Python's standard library."""
    pattern: Annotated[str, Field(min_length=1, max_length=253)] = "*"
    """Which files of a folder are read, as a shell pattern for their names."""
    sequence_length: Size = 128
    """Bytes per sample."""
    held_out_fraction: HeldOutFraction = 0.1
    """Part of the bytes that is kept for evaluation: whole files, of a single file its end."""
    split_seed: Seed = 0
    """Seed of the split."""


class SyntheticKind(StrEnum):
    """The kind of synthetic data."""

    IMAGES = "Images"
    TOKENS = "Tokens"


class SyntheticConfig(ApiModel):
    """Made-up samples that need no files: images that can be learnt (a pattern per class, and noise), random tokens."""

    kind: SyntheticKind
    """Images or Tokens."""
    size: Annotated[int, Field(ge=2, le=1_000_000_000)] = 1024
    """Samples, held-out ones included."""
    held_out_fraction: HeldOutFraction = 0.1
    """Part that is kept for evaluation."""
    data_seed: Seed = 0
    """Seed of the samples."""
    channels: Size | None = None
    """Images only. Absent: 1."""
    height: Size | None = None
    """Images only. Absent: 8."""
    width: Size | None = None
    """Images only. Absent: 8."""
    classes: Size | None = None
    """Images only. Absent: 10."""
    sequence_length: Size | None = None
    """Tokens only. Absent: 128."""
    vocabulary_size: Size | None = None
    """Tokens only. Absent: 256."""


ModelConfig = MlpConfig | ResnetConfig | GptConfig | TransformersConfig
OfTokens = GptConfig | TransformersConfig
DataConfig = DigitsConfig | TextConfig | SyntheticConfig | CorpusConfig | ChatConfig | LinesConfig

MODEL_CONFIGS: dict[ModelName, type[ModelConfig]] = {
    ModelName.MLP: MlpConfig,
    ModelName.RESNET: ResnetConfig,
    ModelName.GPT: GptConfig,
    ModelName.TRANSFORMERS: TransformersConfig,
}
DATA_CONFIGS: dict[DataName, type[DataConfig]] = {
    DataName.DIGITS: DigitsConfig,
    DataName.TEXT: TextConfig,
    DataName.SYNTHETIC: SyntheticConfig,
    DataName.CORPUS: CorpusConfig,
    DataName.CHAT: ChatConfig,
    DataName.LINES: LinesConfig,
}

_IMAGE_DEFAULTS = {"channels": 1, "height": 8, "width": 8, "classes": 10}
_TOKEN_DEFAULTS = {"sequence_length": 128, "vocabulary_size": BYTE_VALUES}


@dataclass(frozen=True)
class Images:
    """The samples of an image data set: an image of `shape` (channels, height, width) and a class."""

    shape: tuple[int, int, int]
    classes: int

    @property
    def size(self) -> int:
        """Numbers per image."""
        channels, height, width = self.shape
        return channels * height * width


@dataclass(frozen=True)
class Tokens:
    """The samples of a text data set: `length` tokens below `vocabulary`, and the successor of each."""

    length: int
    vocabulary: int | None
    """None where only the files themselves know: the trainer compares it with the model's."""


def data_config(data: Data) -> DataConfig:
    """The config of a built-in data set, defaults filled in. Raises pydantic.ValidationError where it is wrong."""
    assert data.name is not None
    config = DATA_CONFIGS[data.name].model_validate(data.config, by_alias=True, by_name=False)
    if isinstance(config, SyntheticConfig):
        defaults = _IMAGE_DEFAULTS if config.kind is SyntheticKind.IMAGES else _TOKEN_DEFAULTS
        missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
        config = config.model_copy(update=missing)
    return config


def model_config(training: Training) -> ModelConfig:
    """The config of a built-in model, with the sizes that follow from the data.

    Raises pydantic.ValidationError where it is wrong; `config_problems` must have found nothing.
    """
    config = _own_config(training.model)
    if training.data.name is None:
        return config
    fitting = _sizes_from(config, samples_of(data_config(training.data)))
    return config.model_copy(update={name: value for name, value in fitting.items() if getattr(config, name) is None})


def samples_of(config: DataConfig) -> Images | Tokens:
    """Return the description of the samples of a built-in data set."""
    if isinstance(config, DigitsConfig):
        return Images(DIGITS_SHAPE, DIGITS_CLASSES)
    if isinstance(config, TextConfig):
        return Tokens(config.sequence_length, BYTE_VALUES)
    if isinstance(config, CorpusConfig | ChatConfig | LinesConfig):
        return Tokens(config.sequence_length, None)
    if config.kind is SyntheticKind.IMAGES:
        shape = (config.channels or 1, config.height or 8, config.width or 8)
        return Images(shape, config.classes or 10)
    return Tokens(config.sequence_length or 128, config.vocabulary_size or BYTE_VALUES)


def config_problems(training: Training) -> list[Problem]:
    """All that is wrong with `model.config` and `data.config`, alone and together. Paths start with `training.`."""
    problems = [*_schema_problems(training), *_choice_problems(training)]
    return problems or list(_fit_problems(training))


def _own_config(model: Model) -> ModelConfig:
    assert model.name is not None
    return MODEL_CONFIGS[model.name].model_validate(model.config, by_alias=True, by_name=False)


def _sizes_from(config: ModelConfig, samples: Images | Tokens) -> dict[str, int]:
    if isinstance(config, OfTokens):
        return {"sequence_length": samples.length} if isinstance(samples, Tokens) else {}
    if isinstance(samples, Tokens):
        return {}
    if isinstance(config, MlpConfig):
        return {"input_size": samples.size, "output_size": samples.classes}
    return {"input_channels": samples.shape[0], "output_size": samples.classes}


def _schema_problems(training: Training) -> Iterator[Problem]:
    chosen: list[tuple[str, Model | Data, type[ApiModel]]] = []
    if training.model.name is not None:
        chosen.append(("model", training.model, MODEL_CONFIGS[training.model.name]))
    if training.data.name is not None:
        chosen.append(("data", training.data, DATA_CONFIGS[training.data.name]))
    for part, component, config in chosen:
        try:
            config.model_validate(component.config, by_alias=True, by_name=False)
        except ValidationError as error:
            for found in sentences.violations(error, config):
                path = ".".join(("training", part, "config", *(str(step) for step in found.location)))
                yield path, f"{found.message}; {found.hint}" if found.hint else found.message


def _choice_problems(training: Training) -> Iterator[Problem]:
    for part in ("model", "data"):
        chosen = getattr(training, part)
        if (chosen.name is not None) + (chosen.entrypoint is not None) != (training.task is None):
            yield f"training.{part}", "exactly one of `name` and `entrypoint` must be given, none with a task"


def _fit_problems(training: Training) -> Iterator[Problem]:
    if training.data.name is not None:
        data = data_config(training.data)
        if isinstance(data, SyntheticConfig):
            yield from _foreign_fields(data)
        if isinstance(data, CorpusConfig):
            yield from corpus_problems(data)
    if training.model.name is None:
        return
    config = _own_config(training.model)
    if isinstance(config, GptConfig) and config.width % config.heads:
        yield (
            "training.model.config.heads",
            f"width {config.width} must be a multiple of heads, which is {config.heads}",
        )
    if isinstance(config, GptConfig):
        yield from _expert_problems(config)
    if isinstance(config, TransformersConfig):
        yield from transformers_problems(config)
        kept = training.checkpoint
        begins = kept is not None and (kept.initial_from is not None or kept.folder is not None)
        if config.lora is not None and config.path is not None and not begins:
            why = "would adapt random numbers, since `path` is read for its config.json alone"
            yield "training.model.config.lora", f"{why}: name the folder in `training.checkpoint.initialFrom`, too"
    if training.data.name is None:
        yield from _missing_sizes(config)
    else:
        yield from _pair_problems(training, config, samples_of(data))


def _expert_problems(config: GptConfig) -> Iterator[Problem]:
    if config.experts is None:
        for name in ("experts_per_token", "capacity_factor", "auxiliary_loss_weight", "z_loss_weight"):
            if getattr(config, name) is not None:
                yield f"training.model.config.{_camel(config, name)}", "needs `experts`: set it, or remove this field"
    elif (config.experts_per_token or EXPERTS_PER_TOKEN) > config.experts:
        yield (
            "training.model.config.expertsPerToken",
            f"{config.experts_per_token} must be less than or equal to experts, which is {config.experts}",
        )


def _foreign_fields(config: SyntheticConfig) -> Iterator[Problem]:
    other = _TOKEN_DEFAULTS if config.kind is SyntheticKind.IMAGES else _IMAGE_DEFAULTS
    for name in other:
        if getattr(config, name) is not None:
            yield f"training.data.config.{_camel(config, name)}", f"must be left out with kind '{config.kind}'"


def _missing_sizes(config: ModelConfig) -> Iterator[Problem]:
    needed = {
        MlpConfig: ("input_size", "output_size"),
        ResnetConfig: ("input_channels", "output_size"),
        GptConfig: ("sequence_length",),
        TransformersConfig: ("sequence_length",),
    }[type(config)]
    for name in needed:
        if getattr(config, name) is None:
            message = "must be given with data from an entry point, whose sizes are not known before it runs"
            yield f"training.model.config.{_camel(config, name)}", message


def _pair_problems(training: Training, config: ModelConfig, samples: Images | Tokens) -> Iterator[Problem]:
    model, data = training.model.name, training.data.name
    if isinstance(config, OfTokens) != isinstance(samples, Tokens):
        takes, gives = ("tokens", "images") if isinstance(config, OfTokens) else ("images", "tokens")
        fitting = (
            "text, corpus, chat, lines, or synthetic of kind Tokens"
            if takes == "tokens"
            else "digits, or synthetic of kind Images"
        )
        yield "training.data.name", f"model '{model}' takes {takes}, data '{data}' has {gives}; choose {fitting}"
        return
    if isinstance(config, OfTokens) and isinstance(samples, Tokens):
        for name, found, least in _token_bounds(config, samples):
            if found is not None and least is not None and found < least:
                message = f"{found} must be greater than or equal to that of data '{data}', which is {least}"
                yield f"training.model.config.{name}", message
        return
    for name, expected in _sizes_from(config, samples).items():
        found = getattr(config, name)
        if found is not None and found != expected:
            message = f"{found} must be {expected} with data '{data}'; leave it out"
            yield f"training.model.config.{_camel(config, name)}", message


def _token_bounds(config: OfTokens, samples: Tokens) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield the name of each size, what the model has and what the data need; None: not known here."""
    yield "sequenceLength", config.sequence_length, samples.length
    if isinstance(config, GptConfig):
        yield "vocabularySize", config.vocabulary_size, samples.vocabulary
    else:
        yield "config.vocab_size", size_of(config, "vocab_size"), samples.vocabulary


def _camel(config: ApiModel, name: str) -> str:
    return type(config).model_fields[name].alias or name
