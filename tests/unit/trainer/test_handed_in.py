"""What a user's model and data hand in is looked at: one sentence, at once, with what was found."""

from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.data.batches import Datasets, Microbatch
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.base import as_model
from disttrain_trainer.tasks.supervised import Supervised
from tests.unit.trainer.worlds import job, small

X, Y = torch.ones(3), torch.tensor(1)
Pair = namedtuple("Pair", ["image", "label"])
ADVICE = "expected (input, target); for other samples give a `training.task`"


def supervised(**changes: Any) -> Supervised:
    return Supervised(JobConfig.model_validate(job(small(**changes))).training)


@pytest.mark.parametrize("sample", [(X, Y), [X, 1], Pair(X, 1.5), (X.numpy(), Y.numpy()), (1.0, 2)])
def test_pairs_of_tensors_arrays_and_numbers_are_samples(sample: Any) -> None:
    inputs, targets = supervised().collate([sample, sample], [0, 1])
    assert (len(inputs), len(targets)) == (2, 2)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"x": X, "y": Y}, f"sample 7 is a dict of 2, {ADVICE}"),
        ({0: X, 1: Y}, f"sample 7 is a dict of 2, {ADVICE}"),
        ((X, X, Y), f"sample 7 is a tuple of 3, {ADVICE}"),
        (X, f"sample 7 is a Tensor, {ADVICE}"),
        ("ab", f"sample 7 is a str, {ADVICE}"),
        (SimpleNamespace(x=X), f"sample 7 is a SimpleNamespace, {ADVICE}"),
        (({"a": X}, Y), "the input of sample 7 is a dict (['a'] a tensor of shape [3], float32), " + ADVICE),
        ((X, (Y, Y)), "the target of sample 7 is a tuple ([0] a tensor of shape [], int64, [1] a tensor of shape"),
        ((X, "cat"), f"the target of sample 7 is a str, {ADVICE}"),
        ((b"cat", Y), f"the input of sample 7 is a bytes, {ADVICE}"),
        ((X, None), f"the target of sample 7 is a NoneType, {ADVICE}"),
        ((SimpleNamespace(), Y), f"the input of sample 7 is a SimpleNamespace, {ADVICE}"),
    ],
)
@pytest.mark.parametrize("look", ["a batch", "tokens", "held-out figure"])
def test_other_samples_are_refused_with_what_was_found(sample: Any, message: str, look: str) -> None:
    task, data = supervised(), Datasets([sample], [sample])
    looks: dict[str, Callable[[], object]] = {
        "a batch": lambda: task.collate([sample], [7]),
        "tokens": lambda: task.counts_tokens(data),
        "held-out figure": lambda: task.has_figure("accuracy", data),
    }
    with pytest.raises(InvalidConfiguration) as refused:
        looks[look]()
    place = {"a batch": "sample 7", "tokens": "sample 0", "held-out figure": "held-out sample 0"}[look]
    assert message.replace("sample 7", place) in str(refused.value)


def microbatch(targets: torch.Tensor) -> Microbatch:
    return Microbatch((torch.ones(2, 3), targets), torch.ones(2), 2.0, 2)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"logits": X}, "a dict"),
        ((X, X), "a tuple"),
        (SimpleNamespace(logits=X), "a SimpleNamespace"),
        (3.5, "a float"),
    ],
)
@pytest.mark.parametrize("loss", ["CrossEntropy", "MeanSquaredError"])
@pytest.mark.parametrize("method", ["loss", "evaluate"])
def test_outputs_that_are_no_tensor_are_refused(outputs: Any, message: str, loss: str, method: str) -> None:
    task = supervised(loss={"name": loss})
    task.use_loss_of(nn.Linear(3, 5))
    with pytest.raises(InvalidConfiguration, match=f"the model returned {message}, expected one tensor"):
        getattr(task, method)(lambda _: outputs, microbatch(torch.tensor([0, 1])))


def test_outputs_without_a_gradient_are_refused() -> None:
    task = supervised()
    task.use_loss_of(nn.Linear(3, 5))
    with pytest.raises(InvalidConfiguration, match="the model returned a tensor without a gradient"):
        task.loss(lambda inputs: inputs, microbatch(torch.tensor([0, 1])))


def test_a_loss_of_the_models_takes_what_its_model_returns() -> None:
    class Own(nn.Linear):
        def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            return outputs["scores"].sum(-1) * (targets + 1)

    task, model = supervised(loss={"name": "Model"}), Own(3, 5)
    task.use_loss_of(model)
    found = task.loss(lambda inputs: {"scores": model(inputs)}, microbatch(torch.tensor([0, 1])))
    assert found.sum.requires_grad


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.LazyLinear(3), "weight"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3, bias=False)), "1.weight"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)), "1.running_mean"),
    ],
    ids=["bare", "in a model", "a buffer"],
)
def test_uninitialised_parameters_are_named(model: nn.Module, name: str) -> None:
    message = (
        rf"`training.model`: `{name}` has no size yet \(Lazy.*\): give its layer its sizes, or call the model once"
    )
    with pytest.raises(InvalidConfiguration, match=message):
        as_model("training.model", "my.code:model", model)


def test_a_lazy_model_that_was_called_is_a_model() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.ones(1, 2))
    assert as_model("training.model", "my.code:model", model) is model
