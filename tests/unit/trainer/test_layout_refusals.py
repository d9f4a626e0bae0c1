"""What a layout asks for and a model does not offer is refused by name."""

import pytest

from tests.unit.trainer.user_layers import of_layers
from tests.unit.trainer.worlds import job, run_cases, run_ranks, small, user

TENSOR = {"tensorParallelDegree": 2}
PIPELINE = {"pipelineParallelDegree": 2}
GPT = {"data": user("double_tokens")}


def table(function="tabled", optimizer="SGD", **settings):
    """A model with sparse gradients."""
    code = "tests.unit.trainer.table_code"
    return small(
        model={"entrypoint": f"{code}:{function}"},
        data={"entrypoint": f"{code}:row_samples"},
        optimizer={"name": optimizer, "learningRate": 0.1, **settings},
    )


def sparse(taker, name="embed.weight"):
    return f"`training.model`: the gradient of `{name}` is sparse, which conflicts with {taker}: use `parallelism."


NOT_SUMMED = "`embed.weight`, `bag.weight` is sparse; replicas sum it where each uses the embedding in every step"
LOCAL = {"mode": "LocalSGD", "localSGD": {"period": 2, "warmupSteps": 1}}
CASES = {
    "sparse gradients in shards": (table(), {"dataParallelShardDegree": 2}, sparse("shards")),
    "sparse gradients and momentum": (table(momentum=0.9), {}, sparse("the momentum of SGD")),
    "sparse gradients and weight decay": (table(weightDecay=0.9), {}, sparse("the weight decay of SGD")),
    "sparse gradients and Adam": (table(optimizer="AdamW"), {}, sparse("AdamW")),
    "sparse gradients and Adafactor": (table(optimizer="Adafactor"), {}, sparse("Adafactor")),
    "sparse gradients, compressed": (
        table(),
        {"dataParallel": {"compression": {"name": "TopK", "ratio": 0.1}}},
        sparse("`compression`"),
    ),
    "sparse gradients, by a ring": (table(), {"dataParallel": {"allReduce": "Ring"}}, sparse("`allReduce`")),
    "sparse gradients, static": (table(), {"dataParallel": {"staticGraph": True}}, sparse("`staticGraph`")),
    "sparse gradients, warm-up": (table(), {"dataParallel": LOCAL}, sparse("`localSGD.warmupSteps`")),
    "sparse gradients of devices": (table(), {"devicesPerProcess": 2}, sparse("`devicesPerProcess`")),
    "sparse gradients and dense ones": (table("whole"), {}, NOT_SUMMED),
    "sparse gradients of no module, in shards": (
        table("hidden"),
        {"dataParallelShardDegree": 2},
        "the gradient of a parameter is sparse; replicas sum it",
    ),
    "sparse gradients of no module": (
        table("hidden", momentum=0.9),
        {"dataParallel": {"mode": "LocalSGD"}},
        sparse("the momentum of SGD"),
    ),
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
        "the training sequences of `training.data` are 9 long, which must be a multiple of `tensorParallelDegree` x",
    ),
    "heads of a user's model that do not divide": (
        small(model=user("double_gpt", heads=3, width=12), **GPT),
        TENSOR,
        "Gpt fails in `blocks.0.attention` (Attention) with its layers cut, and not with whole ones (unflatten: ",
    ),
    "a pipeline of an nn.Sequential that is more than its layers in turn": (
        small(model=of_layers("residual")),
        PIPELINE,
        "Residual does not say what its layers are: make it an nn.Sequential without a forward of its own",
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
    assert error.startswith("InvalidConfiguration: ")
    assert CASES[case][2] in error


def test_a_layer_of_a_stage_that_returns_more_than_a_tensor_is_refused(tmp_path):
    training = small(model=of_layers("forked"))
    ended = run_ranks(tmp_path, job(training, parallelism=PIPELINE), 2)
    # The other one loses its peer.
    assert [rank.code for rank in ended] == [80, 91], ended[0].err
    assert "disttrain: InvalidConfiguration: `training.model`: the layer Fork returns a tuple, but" in ended[0].err


def test_what_fails_with_whole_layers_too_leaves_a_traceback(tmp_path):
    training = small(model=user("planned_mlp", plan="plain", inputs=7))
    ended = run_ranks(tmp_path, job(training, parallelism=TENSOR), 2)
    for rank in ended:
        assert rank.code == 1, rank.err
        assert "Traceback" in rank.err
        assert "disttrain: RankFailed: RuntimeError: " in rank.err
