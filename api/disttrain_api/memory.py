"""The least memory that a training needs for its model, from numbers alone: nothing is built.

Activations, buckets of gradients, copies of devices and old versions of a pipeline come on top: what does not fit by
these numbers does not fit.
"""

from dataclasses import dataclass
from itertools import pairwise

from disttrain_api.builtin import GptConfig, MlpConfig, ResnetConfig, model_config
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.training import Optimizer, OptimizerName, Training
from disttrain_api.transformers_config import TransformersConfig

BYTES_PER_PARAMETER = 4
"""Bytes that a built-in model keeps per parameter; `precision` changes what is computed with, not what is kept."""


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, whole."""

    parameters: int
    trained: int
    """Those of them that have a gradient."""
    bytes: int
    trained_bytes: int

    @classmethod
    def of(cls, parameters: int) -> "ModelSize":
        """All trained, as those of the built-in models are."""
        size = parameters * BYTES_PER_PARAMETER
        return cls(parameters, parameters, size, size)


@dataclass(frozen=True)
class LeastMemory:
    """Bytes."""

    whole: int
    """Bytes on each rank while it builds the model, before it is cut."""
    kept: int
    """Bytes on each rank from its first update on, on average over the ranks that share a copy."""
    servers: int
    """Bytes on all parameter servers together."""

    @property
    def peak(self) -> int:
        """Return the most bytes that a rank holds."""
        return max(self.whole, self.kept)

    def of_ranks(self, ranks: int) -> int:
        """Return the bytes of so many ranks together, even if one builds its model after the other."""
        return max(self.whole, ranks * self.kept)


def builtin_size(training: Training) -> ModelSize | None:
    """The size of a built-in model; None for one from an entry point or of transformers, which only its code knows."""
    if training.model.name is None:
        return None
    config = model_config(training)
    return None if isinstance(config, TransformersConfig) else ModelSize.of(parameters_of(config))


def least_memory(
    size: ModelSize, training: Training, mesh: Mesh, mode: DataParallelMode, *, on_meta: bool | None = None
) -> LeastMemory:
    """Return the memory that ranks with this mesh need for a model of this size. mesh: with parameter servers that of
    one worker. on_meta: whether no rank holds the whole model; None: as the field says."""
    state = size.trained_bytes * _states_of(training.optimizer)
    whole = 0 if (training.model.meta_device if on_meta is None else on_meta) else size.bytes
    share = mesh.of_parameters.shard * mesh.pipeline * mesh.tensor
    if mode is DataParallelMode.PARAMETER_SERVER:
        # Workers let go of gradients as they are pushed.
        return LeastMemory(whole, size.bytes // share, size.bytes + state)
    return LeastMemory(whole, (size.bytes + size.trained_bytes + state) // share, 0)


def parameters_of(config: MlpConfig | ResnetConfig | GptConfig) -> int:
    """The number of parameters of a built-in model whose sizes are all given or filled in."""
    if isinstance(config, MlpConfig):
        return _mlp(config)
    return _gpt(config) if isinstance(config, GptConfig) else _resnet(config)


def _states_of(optimizer: Optimizer) -> int:
    """Numbers that the optimizer keeps per parameter, at least."""
    if optimizer.name is OptimizerName.SGD:
        return 1 if optimizer.momentum else 0
    # Adafactor has numbers of rows and columns; Muon two of the parameters that are no hidden matrices.
    return {OptimizerName.ADAFACTOR: 0, OptimizerName.MUON: 1}.get(optimizer.name, 2)


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _mlp(config: MlpConfig) -> int:
    sizes = [config.input_size or 0, *config.hidden_sizes, config.output_size or 0]
    return sum(_linear(inputs, outputs) for inputs, outputs in pairwise(sizes))


def _gpt(config: GptConfig) -> int:
    width, vocabulary = config.width, config.vocabulary_size
    hidden, bias = 4 * width, config.bias
    norm = 2 * width if bias else width
    if config.experts is None:
        feed_forward = _linear(width, hidden, bias=bias) + _linear(hidden, width, bias=bias)
    else:
        router = _linear(width, config.experts, bias=False)
        feed_forward = router + config.experts * 2 * width * hidden
    block = 2 * norm + 4 * _linear(width, width, bias=bias) + feed_forward
    tables = (vocabulary + (config.sequence_length or 0)) * width
    head = norm + (0 if config.tie_weights else _linear(width, vocabulary, bias=False))
    return tables + config.layers * block + head


def _resnet(config: ResnetConfig) -> int:
    total = 9 * (config.input_channels or 0) * config.width + 2 * config.width
    channels = config.width
    for stage, blocks in enumerate(config.blocks):
        width = config.width * 2**stage
        # The first block changes the size of the image or the number of channels; the others are alike.
        total += 9 * channels * width + (0 if stage == 0 else channels * width)
        total += 9 * width * width + 4 * width
        total += (blocks - 1) * (18 * width * width + 4 * width)
        channels = width
    return total + _linear(channels, config.output_size or 0)


def in_words(size: int) -> str:
    """`34359738368` -> "32.0 GiB"."""
    value, units = float(size), iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    for larger in units:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{value:,.1f} {unit}"
