"""Sizes of built-in models that a layout does not fit are named before anything runs, with the numbers."""

from typing import Any

import pytest

from disttrain_api.validate import problems
from tests.builders import a_manifest

CONFIG = "spec.training.model.config"
TENSOR = {"tensorParallelDegree": 2}
LLAMA = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3}
ONE_KEY = {**LLAMA, "num_key_value_heads": 1}


def trained(name: str, **config: Any) -> dict[str, Any]:
    """The part of a manifest that trains a built-in model on data that it takes."""
    data = {"name": "synthetic", "config": {"kind": "Tokens" if name == "gpt" else "Images"}}
    return {"model": {"name": name, "config": config}, "data": data}


def found(training: dict[str, Any], parallelism: dict[str, Any]) -> list[str]:
    """All that is wrong with the training on four ranks in this layout."""
    manifest = a_manifest(workers={"replicas": 4}, training=training, parallelism=parallelism)
    return [str(problem) for problem in problems(manifest)]


@pytest.mark.parametrize(
    ("training", "parallelism", "field"),
    [
        (trained("gpt", heads=3, width=12), TENSOR, "heads: 3"),
        (trained("gpt", vocabularySize=257), TENSOR, "vocabularySize: 257"),
        (trained("gpt", sequenceLength=129), {**TENSOR, "sequenceParallel": True}, "sequenceLength: 129"),
        (trained("mlp", hiddenSizes=[7]), TENSOR, "hiddenSizes[0]: 7"),
        (trained("mlp", hiddenSizes=[8, 7, 9]), TENSOR, "hiddenSizes[2]: 9"),
        (trained("mlp", hiddenSizes=[9, 7]), TENSOR, "hiddenSizes[0]: 9"),
    ],
)
def test_a_size_that_cannot_divide_is_named(training: dict[str, Any], parallelism: dict[str, Any], field: str) -> None:
    message = f"{CONFIG}.{field} must be a multiple of `tensorParallelDegree`, which is 2"
    assert found(training, parallelism) == [message]


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (trained("gpt", heads=3, width=12), f"{CONFIG}.heads: 3 must be a multiple of `contextParallelDegree`"),
        (
            trained("gpt") | {"data": {"name": "text", "config": {"sequenceLength": 127}}},
            "spec.training.data.config.sequenceLength: 127 must be a multiple of `contextParallelDegree`, which is 2",
        ),
        (trained("gpt", experts=4), None),
        (
            {"model": {"name": "transformers", "config": {"config": LLAMA}}, "data": {"name": "text"}},
            f"{CONFIG}.config.num_key_value_heads: 3 must be a multiple of `contextParallelDegree`, which is 2, or",
        ),
        ({"model": {"name": "transformers", "config": {"config": ONE_KEY}}, "data": {"name": "text"}}, None),
        # It is the data's that is cut; the model's may be longer.
        (trained("gpt", sequenceLength=129), None),
    ],
)
def test_what_parts_of_sequences_need_is_named(training: dict[str, Any], said: str | None) -> None:
    problems = found(training, {"contextParallelDegree": 2})
    assert len(problems) == (said is not None)
    assert said is None or problems[0].startswith(said)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (trained("gpt", heads=3, width=12), None),
        (
            trained("gpt") | {"data": {"name": "text", "config": {"sequenceLength": 126}}},
            "spec.training.data.config.sequenceLength: 126 must be a multiple of 2 x `contextParallelDegree`, which is",
        ),
        (trained("gpt", dropout=0.1), f"{CONFIG}.dropout: 0.1 conflicts with `contextParallelMethod` Ring: set it to"),
        (
            {
                "model": {"name": "transformers", "config": {"config": {**LLAMA, "attention_dropout": 0.2}}},
                "data": {"name": "text"},
            },
            f"{CONFIG}.config.attention_dropout: 0.2 conflicts with `contextParallelMethod` Ring",
        ),
    ],
)
def test_a_ring_needs_no_heads_but_even_sequences_and_no_dropout(training: dict[str, Any], said: str | None) -> None:
    problems = found(training, {"contextParallelDegree": 2, "contextParallelMethod": "Ring"})
    assert len(problems) == (said is not None)
    assert said is None or problems[0].startswith(said)


def test_fused_projections_leave_all_heads_to_each_rank_of_a_tensor_group() -> None:
    phi = {**LLAMA, "model_type": "phi3", "intermediate_size": 34}
    training = {"model": {"name": "transformers", "config": {"config": phi}}, "data": {"name": "text"}}
    assert found(training, TENSOR) == []
    said = f"{CONFIG}.config.intermediate_size: 34 must be a multiple of `tensorParallelDegree`, which is 4"
    assert found(training, {"tensorParallelDegree": 4}) == [said]
    phi["num_key_value_heads"] = 1
    assert found(training, {"tensorParallelDegree": 2, "contextParallelDegree": 2}) == []
    phi["num_attention_heads"] = 3
    said = f"{CONFIG}.config.num_attention_heads: 3 must be a multiple of `contextParallelDegree`, which is 2"
    assert found(training, {"tensorParallelDegree": 2, "contextParallelDegree": 2}) == [said]


def test_tensor_groups_divide_what_is_left_of_heads_and_sequences() -> None:
    layout = {"contextParallelDegree": 2, **TENSOR}
    needed = "must be a multiple of `contextParallelDegree` x `tensorParallelDegree`, which is 4"
    assert found(trained("gpt", heads=2), layout) == [f"{CONFIG}.heads: 2 {needed}"]
    short = trained("gpt", sequenceLength=132) | {"data": {"name": "text", "config": {"sequenceLength": 130}}}
    assert found(short, layout) == []
    said = f"spec.training.data.config.sequenceLength: 130 {needed}"
    assert found(short, {**layout, "sequenceParallel": True}) == [said]


@pytest.mark.parametrize(
    ("training", "parallelism"),
    [
        (trained("gpt", heads=4, width=12, vocabularySize=258, sequenceLength=129), TENSOR),
        (trained("gpt", heads=3, width=12, vocabularySize=257), {}),
        (trained("gpt", sequenceLength=130), {**TENSOR, "sequenceParallel": True}),
        # The inputs of a layer whose outputs are summed are those of the one before it.
        (trained("mlp", hiddenSizes=[8, 7, 10]), TENSOR),
        # A last layer without a partner stays whole.
        (trained("mlp", hiddenSizes=[8, 7]), TENSOR),
    ],
)
def test_sizes_that_divide_or_are_not_cut_are_right(training: dict[str, Any], parallelism: dict[str, Any]) -> None:
    assert found(training, parallelism) == []


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (trained("gpt", layers=1), f"{CONFIG}.layers: makes 3 layers"),
        (trained("mlp", hiddenSizes=[8, 8]), f"{CONFIG}.hiddenSizes: makes 3 layers"),
    ],
)
def test_a_model_with_fewer_layers_than_stages_is_refused(training: dict[str, Any], message: str) -> None:
    expected = f"{message} that can be split, there are 4 stages: use fewer, or more layers"
    assert found(training, {"pipelineParallelDegree": 4}) == [expected]
    looped = {"pipelineParallelDegree": 2, "pipeline": {"schedule": "LoopedBFS", "microbatches": 2}}
    assert found(training, looped) == [expected]
    assert found(training, {"pipelineParallelDegree": 2}) == []


@pytest.mark.parametrize(
    ("training", "given", "layers"),
    [
        (trained("gpt", layers=4), [3, 4], 6),
        (trained("mlp", hiddenSizes=[8, 8]), [2, 1], 8),
        (trained("resnet", blocks=[1, 2]), [4, 6], 9),
    ],
)
def test_layers_of_stages_that_are_not_those_of_the_model_are_refused(training, given, layers):
    layout = {"pipelineParallelDegree": 2, "pipeline": {"layersPerStage": given}}
    message = f"the sum is {sum(given)}, but the model has {layers} layers, those without parameters included"
    assert found(training, layout) == [f"spec.parallelism.pipeline.layersPerStage: {message}"]
    layout["pipeline"] = {"layersPerStage": [given[0], layers - given[0]]}
    assert found(training, layout) == []


def test_devices_without_a_layer_are_refused() -> None:
    layout = {"devicesPerProcess": 6, "deviceMode": "Place"}
    message = f"{CONFIG}.hiddenSizes: makes 5 layers, `deviceMode` Place has 6 devices: use fewer, or more layers"
    assert found(trained("mlp", hiddenSizes=[8]), layout) == [message]
    assert found(trained("mlp", hiddenSizes=[8]), {**layout, "devicesPerProcess": 5}) == []
    assert found(trained("mlp", hiddenSizes=[8]), {"devicesPerProcess": 6}) == []


@pytest.mark.parametrize("schedule", ["PipeDream", "PipeDream2BW"])
def test_experts_in_a_pipeline_that_is_never_flushed_are_refused(schedule: str) -> None:
    training = trained("gpt", experts=4, tieWeights=False)
    layout = {"pipelineParallelDegree": 2, "pipeline": {"schedule": schedule}}
    (message,) = found(training, layout)
    assert message.startswith(
        f"{CONFIG}.experts: experts do not go with PipeDream and PipeDream2BW: how busy each is is"
    )
    assert found(training, {"pipelineParallelDegree": 2}) == []
    assert found(trained("gpt", tieWeights=False), layout) == []


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({}, {"dataParallelShardDegree": 2}),
        ({"offload": {"parameters": True}}, {}),
        ({}, {"tensorParallelDegree": 2, "expertParallelDegree": 2}),
    ],
)
def test_tied_weights_that_are_sharded_in_two_stages_of_a_rank_are_refused(changes, degrees, schedule):
    sizes = {"vocabularySize": 258, **({"experts": 4} if "expertParallelDegree" in degrees else {})}
    layout = {"pipelineParallelDegree": 2, "pipeline": {"schedule": schedule}, **degrees}
    (message,) = found({**trained("gpt", **sizes), **changes}, layout)
    assert message == (
        f"{CONFIG}.tieWeights: two stages of one rank share the tied weights, which sharded ones cannot with schedule"
        f" '{schedule}': set it to false, or use InterleavedZeroBubble"
    )
    assert found({**trained("gpt", **sizes, tieWeights=False), **changes}, layout) == []
    other = {**layout, "pipeline": {"schedule": "InterleavedZeroBubble"}}
    assert found({**trained("gpt", **sizes), **changes}, other) == []


def test_tied_weights_in_a_pipeline_that_is_never_flushed_are_refused() -> None:
    (message,) = found(trained("gpt"), {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream"}})
    assert message.startswith(f"{CONFIG}.tieWeights: stages of PipeDream and PipeDream2BW update at different times")


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 6, "intermediate_size": 33}


@pytest.mark.parametrize(
    ("config", "parallelism", "said"),
    [
        (MIXTRAL, {"dataParallelShardDegree": 2, "expertParallelDegree": 2}, None),
        ({"model_type": "mixtral"}, {"dataParallelShardDegree": 2, "expertParallelDegree": 2}, None),
        *(
            (
                {"model_type": "qwen3_moe", name: 6},
                {"dataParallelShardDegree": 4, "expertParallelDegree": 4},
                f"config.{name}: 6 must be a multiple of `expertParallelDegree`, which is 4",
            )
            for name in ("num_experts", "num_local_experts")
        ),
        (
            MIXTRAL,
            {"dataParallelShardDegree": 4, "expertParallelDegree": 4},
            "config.num_local_experts: 6 must be a multiple of `expertParallelDegree`, which is 4",
        ),
        (
            LLAMA,
            {"dataParallelShardDegree": 2, "expertParallelDegree": 2},
            "config.model_type: 'llama' has no experts: `expertParallelDegree` must be 1, found 2",
        ),
        (
            MIXTRAL,
            {"contextParallelDegree": 4, "expertParallelDegree": 4},
            "config.num_local_experts: 6 must be a multiple of `expertParallelDegree`, which is 4",
        ),
        (MIXTRAL, {"devicesPerProcess": 2}, "config.num_local_experts: experts conflict with `devicesPerProcess`"),
        ({"model_type": "mixtral"}, {"devicesPerProcess": 2}, "config.num_local_experts: experts conflict with `devi"),
        # Experts are not cut.
        (MIXTRAL, TENSOR, None),
    ],
)
def test_what_experts_of_transformers_need_is_named(
    config: dict[str, Any], parallelism: dict[str, Any], said: str | None
) -> None:
    training = {"model": {"name": "transformers", "config": {"config": config}}, "data": {"name": "text"}}
    problems = found(training, parallelism)
    assert len(problems) == (said is not None)
    assert said is None or problems[0].startswith(f"{CONFIG}.{said}")
