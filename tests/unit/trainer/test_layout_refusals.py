"""What a layout asks for and a model does not offer is refused by name."""

import pytest

from tests.unit.trainer.worlds import run_cases, small, user

TENSOR = {"tensorParallelDegree": 2}
PIPELINE = {"pipelineParallelDegree": 2}
GPT = {"data": user("double_tokens")}
CASES = {
    "no plan": (small(), TENSOR, "the model Sequential has no method `tensor_plan`"),
    "a plan that leads nowhere": (
        small(model=user("planned_mlp", plan="nowhere")),
        TENSOR,
        "tensor_plan names `3.missing`, but the model has no such submodule",
    ),
    "a plan without vocabulary": (
        small(model=user("planned_mlp", plan="plain")),
        TENSOR | {"vocabularyParallel": True},
        "tensor_plan(sequence=False, vocabulary=True) raised ValueError: neither sequence nor vocabulary",
    ),
    "a size that does not divide": (
        small(model=user("planned_mlp", plan="plain", hidden=7)),
        TENSOR,
        "size 7 (dimension 0 of parameter `0.weight`) must be a multiple of 2",
    ),
    "built-in heads that do not divide": (
        small(model={"name": "gpt", "config": {"heads": 3, "width": 12}}, data={"name": "text"}),
        TENSOR,
        "spec.training.model.config.heads: 3 must be a multiple of `tensorParallelDegree`, which is 2",
    ),
    "sequences that do not divide": (
        small(model=user("double_gpt"), data=user("ragged_tokens")),
        TENSOR | {"sequenceParallel": True},
        "the training sequences of `training.data` are 9 long, which must be a multiple of `tensorParallelDegree`",
    ),
    "a pipeline of a model that does not say what its layers are": (
        small(model=user("wide_mlp"), data=user("float_samples")),
        PIPELINE,
        "Wide does not say what its layers are",
    ),
    "a pipeline with more stages than layers": (
        small(model=user("double_mlp")),
        PIPELINE | {"pipeline": {"schedule": "DualPipeV", "microbatches": 4}},
        "Sequential has 3 layers with parameters, there are 4 stages: use fewer stages",
    ),
    "a pipeline whose layers are counted wrongly": (
        small(model=user("double_mlp")),
        PIPELINE | {"pipeline": {"layersPerStage": [2, 2]}},
        "2 + 2 = 4, but the model has 5 layers",
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    cases = {
        name: [{"training": training, "parallelism": parallelism}] for name, (training, parallelism, _) in CASES.items()
    }
    return run_cases(tmp_path_factory.mktemp("refused"), 2, cases)


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_by_name(refused, case):
    (error,) = refused[case]["errors"]
    assert error is not None
    assert error.startswith("InvalidConfiguration: ")
    assert CASES[case][2] in error
