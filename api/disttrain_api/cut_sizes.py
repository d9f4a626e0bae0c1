"""Divisibility of the built-in models: sizes that a degree must divide, and enough layers for all stages.

CEL cannot see them: the config of a model has no schema.
"""

from collections.abc import Iterator
from typing import NamedTuple

from disttrain_api.builtin import (
    GptConfig,
    MlpConfig,
    ModelConfig,
    OfTokens,
    ResnetConfig,
    Tokens,
    config_problems,
    data_config,
    model_config,
    samples_of,
)
from disttrain_api.parallelism import ContextParallelMethod, DataParallelMode, DeviceMode, Parallelism
from disttrain_api.pipeline import V_SCHEDULES, is_flushless, schedule_of, stages_of
from disttrain_api.training import Training
from disttrain_api.transformers_config import (
    Problem,
    TransformersConfig,
    adapter_problems,
    experts_of,
    layers_of,
    size_of,
)

TIED_WITHOUT_FLUSH = "stages of PipeDream and PipeDream2BW update at different times, so they cannot share a parameter"
TIED_IN_SHARDS = "two stages of one rank share the tied weights, which sharded ones cannot"
EXPERTS_WITHOUT_FLUSH = (
    "how busy each is is counted over a whole step, and stages that are never flushed are in different ones"
)


def cut_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    """Return the problems of a built-in model's sizes in this layout."""
    if training.model.name is None or config_problems(training):
        return
    yield from _tensor_problems(training, parallelism)
    yield from _context_problems(training, parallelism)
    yield from _expert_problems(training, parallelism)
    yield from _layer_problems(training, parallelism)
    config = model_config(training)
    tied = _tied_by(config)
    if tied and is_flushless(parallelism):
        yield f"training.model.config.{tied}", f"{TIED_WITHOUT_FLUSH}: set it to false"
    if tied and _sharded_v(training, parallelism):
        reason = f"{TIED_IN_SHARDS} with schedule '{schedule_of(parallelism)}'"
        yield f"training.model.config.{tied}", f"{reason}: set it to false, or use InterleavedZeroBubble"


def _tied_by(config: ModelConfig) -> str | None:
    """The setting that makes the head the embeddings; None where they are apart, or only the trainer knows."""
    if isinstance(config, GptConfig) and config.tie_weights:
        return "tieWeights"
    written = config.config if isinstance(config, TransformersConfig) else None
    return "config.tie_word_embeddings" if (written or {}).get("tie_word_embeddings") is True else None


def _sharded_v(training: Training, parallelism: Parallelism) -> bool:
    """Whether the first and the last stage of a pipeline lie on one rank, whose parameters are FSDP2's."""
    degrees = (parallelism.data_parallel_shard_degree, parallelism.expert_parallel_degree)
    sharded = training.offload.parameters or any((degree or 1) > 1 for degree in degrees)
    return sharded and (parallelism.pipeline_parallel_degree or 1) > 1 and schedule_of(parallelism) in V_SCHEDULES


class _Layers(NamedTuple):
    """The layers of a model, as the trainer counts them."""

    setting: str
    """What of `config` decides how many there are."""
    to_split: int
    """Those with parameters of their own."""
    total: int


def _layers_of(training: Training) -> _Layers | None:
    """None where only the trainer knows."""
    config = model_config(training)
    if isinstance(config, TransformersConfig):
        found = layers_of(config)
        return None if found is None else _Layers("config.num_hidden_layers", *found)
    if isinstance(config, GptConfig):
        # The embeddings stand before the blocks, the head behind them.
        return _Layers("layers", config.layers + 2, config.layers + 2)
    if isinstance(config, MlpConfig):
        # The input is flattened; each hidden layer has an activation and dropout.
        hidden = len(config.hidden_sizes)
        return _Layers("hiddenSizes", hidden + 1, 3 * hidden + 2)
    assert isinstance(config, ResnetConfig)
    # A convolution, its normalisation and activation before the blocks; pooling, flattening and a linear layer behind.
    return _Layers("blocks", sum(config.blocks) + 3, sum(config.blocks) + 6)


def _layer_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    layers, stages = _layers_of(training), stages_of(parallelism)
    if layers is None:
        return
    path, advice = f"training.model.config.{layers.setting}", "use fewer, or more layers"
    if stages > layers.to_split:
        yield path, f"makes {layers.to_split} layers that can be split, there are {stages} stages: {advice}"
    given = parallelism.pipeline.layers_per_stage if parallelism.pipeline is not None else None
    if given is not None and sum(given) != layers.total:
        message = f"the sum is {sum(given)}, but the model has {layers.total} layers, those without parameters included"
        yield "parallelism.pipeline.layersPerStage", message
    devices = parallelism.devices_per_process or 1
    if parallelism.device_mode is DeviceMode.PLACE and devices > layers.total:
        yield path, f"makes {layers.total} layers, `deviceMode` Place has {devices} devices: {advice}"


def _tensor_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    degree = parallelism.tensor_parallel_degree or 1
    if degree == 1:
        return
    config = model_config(training)
    if isinstance(config, TransformersConfig):
        yield from adapter_problems(config)
    for name, size in _cut_sizes(training, parallelism):
        if size % degree:
            message = f"{size} must be a multiple of `tensorParallelDegree`, which is {degree}"
            yield f"training.model.config.{name}", message


def _context_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    degree, config = parallelism.context_parallel_degree or 1, model_config(training)
    if degree == 1 or not isinstance(config, OfTokens):
        return
    tensor = parallelism.tensor_parallel_degree or 1
    by_heads = 1 if _has_fused_projections(config) else tensor
    product = degree * by_heads
    ring = parallelism.context_parallel_method is ContextParallelMethod.RING
    if ring:
        yield from _dropout_problems(config)
    for name, heads, repeated in () if ring else _heads_of(config):
        if heads is not None and heads % product and not (repeated and product % heads == 0):
            advice = ", or divide it" if repeated else ""
            yield f"training.model.config.{name}", f"{heads} {_multiple_of(degree, by_heads)}{advice}"
    samples = samples_of(data_config(training.data)) if training.data.name is not None else None
    cut = tensor if parallelism.sequence_parallel else 1
    if isinstance(samples, Tokens) and samples.length % (degree * cut):
        yield "training.data.config.sequenceLength", f"{samples.length} {_multiple_of(degree, cut)}"
    elif isinstance(samples, Tokens) and ring and samples.length % (2 * degree):
        message = f"{samples.length} must be a multiple of 2 x `contextParallelDegree`, which is {2 * degree}"
        yield "training.data.config.sequenceLength", f"{message}, with `contextParallelMethod` Ring"


def _dropout_problems(config: OfTokens) -> Iterator[Problem]:
    """Yield dropout of attention, as far as the manifest says it: a ring computes attention without."""
    written: tuple[str, object] = (
        ("dropout", config.dropout)
        if isinstance(config, GptConfig)
        else ("config.attention_dropout", (config.config or {}).get("attention_dropout"))
    )
    name, found = written
    if found:
        advice = "conflicts with `contextParallelMethod` Ring: set it to 0, or use Ulysses"
        yield f"training.model.config.{name}", f"{found} {advice}"


def _heads_of(config: OfTokens) -> Iterator[tuple[str, int | None, bool]]:
    """Yield how many heads queries and keys have, None where only the trainer knows, and whether several ranks may have
    the same one."""
    if isinstance(config, GptConfig):
        yield "heads", config.heads, False
    else:
        yield "config.num_attention_heads", size_of(config, "num_attention_heads"), False
        yield "config.num_key_value_heads", size_of(config, "num_key_value_heads"), True


def _has_fused_projections(config: OfTokens) -> bool:
    """Return whether one matrix has several projections: each rank of a tensor group then computes all heads."""
    return isinstance(config, TransformersConfig) and (config.config or {}).get("model_type") == "phi3"


def _multiple_of(context: int, tensor: int) -> str:
    factors = "`contextParallelDegree`" + (" x `tensorParallelDegree`" if tensor > 1 else "")
    return f"must be a multiple of {factors}, which is {context * tensor}"


class _Experts(NamedTuple):
    """The experts of each layer."""

    path: str
    number: int | None
    """None where only the trainer knows."""


def _experts_of(config: ModelConfig) -> _Experts | None:
    """None where there are none, or only the trainer knows."""
    if isinstance(config, GptConfig) and config.experts is not None:
        return _Experts("training.model.config.experts", config.experts)
    found = experts_of(config) if isinstance(config, TransformersConfig) else None
    return None if found is None else _Experts(f"training.model.config.config.{found[0]}", found[1])


def _lacking_experts(config: ModelConfig, degree: int) -> Iterator[Problem]:
    if isinstance(config, GptConfig):
        message = f"must be given, and be a multiple of `expertParallelDegree`, which is {degree}"
        yield "training.model.config.experts", message
    elif isinstance(config, TransformersConfig) and config.config is not None:
        family = config.config.get("model_type")
        message = f"'{family}' has no experts: `expertParallelDegree` must be 1, found {degree}"
        yield "training.model.config.config.model_type", message


def _expert_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    config, degree = model_config(training), parallelism.expert_parallel_degree or 1
    found = _experts_of(config)
    if found is None:
        if degree > 1:
            yield from _lacking_experts(config, degree)
        return
    path, experts = found
    if experts is not None and experts % degree:
        yield path, f"{experts} must be a multiple of `expertParallelDegree`, which is {degree}"
    elif (parallelism.devices_per_process or 1) > 1:
        yield path, "experts conflict with `devicesPerProcess`: they need a process per device; remove one of the two"
    elif parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER:
        yield path, "experts do not go with ParameterServer: how busy each is is counted over all workers in each step"
    elif is_flushless(parallelism):
        yield path, f"experts do not go with PipeDream and PipeDream2BW: {EXPERTS_WITHOUT_FLUSH}; use another schedule"


def _cut_sizes(training: Training, parallelism: Parallelism) -> Iterator[tuple[str, int]]:
    config = model_config(training)
    if isinstance(config, GptConfig):
        # The width is a multiple of the heads, the feed-forward layer of the width.
        yield "heads", config.heads
        yield "vocabularySize", config.vocabulary_size
        if parallelism.sequence_parallel:
            yield "sequenceLength", config.sequence_length or 0
    elif isinstance(config, TransformersConfig):
        heads = () if _has_fused_projections(config) else ("num_attention_heads", "num_key_value_heads")
        # Experts are not cut.
        feed_forward = ("intermediate_size",) if experts_of(config) is None else ()
        for name in (*heads, *feed_forward, "vocab_size"):
            if (size := size_of(config, name)) is not None:
                yield f"config.{name}", size
        if parallelism.sequence_parallel:
            yield "sequenceLength", config.sequence_length or 0
    elif isinstance(config, MlpConfig):
        # Layers are cut by columns and by rows in turn; a last one without a partner stays whole.
        widths = list(enumerate(config.hidden_sizes))
        for number, size in widths[::2] if len(widths) % 2 else widths[:-1:2]:
            yield f"hiddenSizes.{number}", size
