"""Which layers make up each stage of a pipeline."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import nn

from disttrain_api.parallelism import Parallelism, PipelineSplit
from disttrain_api.pipeline import stages_of
from disttrain_trainer.parallel.layers import composes, layers_of, place
from disttrain_trainer.runtime.errors import InvalidConfiguration

Layers = list[nn.Module]


def split_layers(
    module: nn.Module, parallelism: Parallelism, seconds_of: Callable[[Layers], list[float]]
) -> list[Layers]:
    """The layers of every stage, in order; each stage has parameters of its own.

    seconds_of: measures what each layer takes; asked only where the manifest splits by time.
    Raises InvalidConfiguration where the model does not say what its layers are, or has too few of them.
    """
    if not composes(module):
        raise InvalidConfiguration(
            f"`parallelism.pipelineParallelDegree`: {type(module).__name__} does not say what its layers are: make it "
            "an nn.Sequential without a forward of its own, or give it a method `layers` that returns the modules "
            "whose composition it is"
        )
    layers, stages = layers_of(module), stages_of(parallelism)
    settings = parallelism.pipeline
    if settings is not None and settings.layers_per_stage is not None:
        return _as_given(layers, settings.layers_per_stage)
    split = (settings.split if settings is not None else None) or PipelineSplit.EVEN
    blocks = _blocks(layers)
    if len(blocks) < stages:
        raise InvalidConfiguration(
            f"`parallelism.pipelineParallelDegree`: {type(module).__name__} has {len(blocks)} layers with parameters, "
            f"there are {stages} stages: use fewer stages"
        )
    if split is PipelineSplit.TIME:
        seconds = dict(zip(layers, seconds_of(layers), strict=True))
        sizes = [sum(seconds[layer] for layer in block) for block in blocks]
    elif split is PipelineSplit.PARAMETERS:
        sizes = [float(sum(p.numel() for layer in block for p in layer.parameters())) for block in blocks]
    else:
        sizes = [1.0] * len(blocks)
    return grouped(blocks, place(sizes, stages), stages)


def grouped(blocks: Sequence[Layers], places: Sequence[int], stages: int) -> list[Layers]:
    """The layers of the blocks that are placed on each stage."""
    result: list[Layers] = [[] for _ in range(stages)]
    for block, stage in zip(blocks, places, strict=True):
        result[stage] += block
    return result


def _as_given(layers: Layers, counts: Sequence[int]) -> list[Layers]:
    if sum(counts) != len(layers):
        raise InvalidConfiguration(
            f"`parallelism.pipeline.layersPerStage`: {' + '.join(map(str, counts))} = {sum(counts)}, but the model has "
            f"{len(layers)} layers"
        )
    stages = [layers[begin:end] for begin, end in pairwise([0, *accumulate(counts)])]
    for number, stage in enumerate(stages):
        if not any(_has_parameters(layer) for layer in stage):
            raise InvalidConfiguration(
                f"`parallelism.pipeline.layersPerStage`: stage {number} ({', '.join(type(x).__name__ for x in stage)}) "
                "has no parameters: give every stage a layer that has some"
            )
    return stages


def _blocks(layers: Layers) -> list[Layers]:
    """The layers, each without parameters beside the one before it; leading ones beside the first that has some."""
    blocks: list[Layers] = []
    leading: Layers = []
    for layer in layers:
        if _has_parameters(layer):
            blocks.append([*leading, layer])
            leading = []
        elif blocks:
            blocks[-1].append(layer)
        else:
            leading.append(layer)
    return blocks


def _has_parameters(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())
