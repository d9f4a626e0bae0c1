"""Sizes of the built-in models that a degree must divide. CEL cannot see them: the config of a model has no schema."""

from collections.abc import Iterator

from disttrain_api.builtin import GptConfig, MlpConfig, Problem, config_problems, model_config
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training


def cut_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    """Every size of a built-in model that the degrees do not divide. Paths start with `training.`."""
    if training.model.name is None or config_problems(training):
        return
    yield from _expert_problems(training, parallelism)
    degree = parallelism.tensor_parallel_degree or 1
    for name, size in _cut_sizes(training, parallelism) if degree > 1 else ():
        if size % degree:
            message = f"{size} must be a multiple of `tensorParallelDegree`, which is {degree}"
            yield f"training.model.config.{name}", message


def _expert_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    config = model_config(training)
    if not isinstance(config, GptConfig):
        return
    degree, path = parallelism.expert_parallel_degree or 1, "training.model.config.experts"
    if config.experts is None:
        if degree > 1:
            yield path, f"must be given, and be a multiple of `expertParallelDegree`, which is {degree}"
    elif config.experts % degree:
        yield path, f"{config.experts} must be a multiple of `expertParallelDegree`, which is {degree}"
    elif (parallelism.devices_per_process or 1) > 1:
        yield path, "experts do not go with `devicesPerProcess`: they want a process per device; choose one of the two"


def _cut_sizes(training: Training, parallelism: Parallelism) -> Iterator[tuple[str, int]]:
    config = model_config(training)
    if isinstance(config, GptConfig):
        # The width is a multiple of the heads, the feed-forward layer of the width.
        yield "heads", config.heads
        yield "vocabularySize", config.vocabulary_size
        if parallelism.sequence_parallel:
            yield "sequenceLength", config.sequence_length or 0
    elif isinstance(config, MlpConfig):
        # Layers are cut by columns and by rows in turn; a last one without a partner stays whole.
        widths = list(enumerate(config.hidden_sizes))
        for number, size in widths[::2] if len(widths) % 2 else widths[:-1:2]:
            yield f"hiddenSizes.{number}", size
