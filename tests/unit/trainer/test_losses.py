"""Weighted sums against torch's own means."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from disttrain_api.training import Loss, Training
from disttrain_trainer.data.batches import Datasets, Microbatch
from disttrain_trainer.evaluate import perplexity_of
from disttrain_trainer.losses import IGNORED, build_loss, weight_of
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.base import PERPLEXITY
from disttrain_trainer.tasks.supervised import Supervised
from tests.unit.trainer.worlds import small

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(8, 5, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(5, (8,), generator=GENERATOR)
TOKEN_LOGITS = torch.randn(4, 6, 5, generator=GENERATOR, dtype=torch.float64)
TOKENS = torch.randint(5, (4, 6), generator=GENERATOR)
ONES, SOME = torch.ones(8), torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])


def mean(loss, outputs, targets, weights, model=None):
    return (
        build_loss(loss, model or nn.Identity()).sum(outputs, targets, weights) / weight_of(targets, weights)
    ).item()


@pytest.mark.parametrize("smoothing", [None, 0.1])
def test_cross_entropy_is_torchs_mean(smoothing):
    expected = functional.cross_entropy(LOGITS, CLASSES, label_smoothing=smoothing or 0.0)
    assert mean(Loss(label_smoothing=smoothing), LOGITS, CLASSES, ONES) == pytest.approx(expected.item())


def test_padding_does_not_count():
    expected = functional.cross_entropy(LOGITS[:5], CLASSES[:5])
    assert mean(Loss(), LOGITS, CLASSES, SOME) == pytest.approx(expected.item())


def test_ignored_tokens_do_not_count():
    targets = TOKENS.clone()
    targets[0, 2:] = targets[3, :] = IGNORED
    expected = functional.cross_entropy(TOKEN_LOGITS.flatten(0, 1), targets.flatten())
    assert mean(Loss(), TOKEN_LOGITS, targets, torch.ones(4)) == pytest.approx(expected.item())
    assert weight_of(targets, torch.ones(4)) == 24 - 4 - 6


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 5), (8, 2, 3)])
def test_squared_error_is_torchs_mean(shape):
    outputs, targets = torch.randn(2, *shape, generator=GENERATOR, dtype=torch.float64)
    expected = functional.mse_loss(outputs, targets)
    assert mean(Loss(name="MeanSquaredError"), outputs, targets, ONES) == pytest.approx(expected.item())


def test_squared_error_of_classes_is_that_of_one_hot_vectors():
    expected = functional.mse_loss(LOGITS, functional.one_hot(CLASSES, 5).double())
    assert mean(Loss(name="MeanSquaredError"), LOGITS, CLASSES, ONES) == pytest.approx(expected.item())


NUMBERS = torch.randint(-3, 9, (8, 5), generator=GENERATOR)
SQUARED = Loss(name="MeanSquaredError")


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int8, torch.float32])
@pytest.mark.parametrize("size", [1, 5, 8])
def test_numbers_of_the_outputs_shape_are_numbers(kind, size):
    """Also where the batch is as large as the outputs, or 1: nothing is a class, and nothing is broadcast."""
    outputs, targets, weights = LOGITS[:size], NUMBERS[:size].to(kind), SOME[:size]
    counted = min(size, 5)
    expected = functional.mse_loss(outputs[:counted], targets[:counted].double())
    assert mean(SQUARED, outputs, targets, weights) == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("outputs", "targets"), [((4, 1), (4,)), ((4,), (4, 1)), ((4, 6), (4, 2, 3)), ((4, 1, 2, 3), (4, 2, 3))]
)
@pytest.mark.parametrize("whole", [False, True])
def test_squared_error_takes_the_same_numbers_in_another_form(outputs, targets, whole):
    found = torch.randn(outputs, generator=GENERATOR, dtype=torch.float64)
    wanted = torch.randn(targets, generator=GENERATOR, dtype=torch.float64)
    wanted = (5 * wanted).long() if whole else wanted
    expected = functional.mse_loss(found.flatten(), wanted.flatten().double())
    assert mean(SQUARED, found, wanted, torch.ones(4)) == pytest.approx(expected.item())


@pytest.mark.parametrize("smoothing", [None, 0.1])
@pytest.mark.parametrize("outputs", [LOGITS, TOKEN_LOGITS], ids=["samples", "tokens"])
def test_probabilities_are_targets_as_for_torch(outputs, smoothing):
    targets = torch.rand(outputs.shape, generator=GENERATOR).softmax(-1)
    flat = outputs.flatten(0, -2), targets.flatten(0, -2).double()
    expected = functional.cross_entropy(*flat, label_smoothing=smoothing or 0.0)
    weights = torch.ones(len(outputs))
    found = mean(Loss(label_smoothing=smoothing), outputs, targets, weights)
    assert found == pytest.approx(expected.item())


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", ["CrossEntropy", "MeanSquaredError"])
def test_classes_are_whole_numbers_of_any_format(name, kind):
    assert mean(Loss(name=name), LOGITS, CLASSES.to(kind), ONES) == mean(Loss(name=name), LOGITS, CLASSES, ONES)


def test_a_class_of_bytes_is_not_the_mark_of_what_does_not_count():
    assert weight_of(torch.tensor([IGNORED + 256], dtype=torch.uint8), torch.ones(1)) == 1


HAVE = "`training.loss.name` {}: the model's outputs have the shape {}, its targets {} and the type {}; "
SCORES_LAST = "expected outputs of shape [{}, classes], the scores of the classes last"
MOVE = " (where they come second, the model ends with `.movedim(1, -1)`)"
CLASSES_OR = "expected classes, which are whole numbers, of shape [8], or a probability for each {}; for other numbers "
AS_MANY = "expected as many numbers for each sample, in the same order"
CROSS, SQUARE = "CrossEntropy", "MeanSquaredError"
# name of the loss, shape of outputs, targets, what is expected
UNFIT = {
    "scores second": (CROSS, (4, 5, 6), TOKENS, SCORES_LAST.format("4, 6") + MOVE),
    "scores second, of a map": (CROSS, (4, 5, 2, 3), TOKENS.view(4, 2, 3), SCORES_LAST.format("4, 2, 3") + MOVE),
    "too few": (CROSS, (4, 5), TOKENS, SCORES_LAST.format("4, 6")),
    "as many by chance": (CROSS, (6, 4, 5), TOKENS, SCORES_LAST.format("4, 6")),
    "classes in a column": (CROSS, (8, 5), CLASSES.view(8, 1), SCORES_LAST.format("8, 1")),
    "no scores": (CROSS, (8,), CLASSES, SCORES_LAST.format("8")),
    "numbers for classes": (
        CROSS, (8, 5), CLASSES.float(), CLASSES_OR.format("class, of shape [8, 5]") + "name MeanSquaredError"
    ),
    "numbers of one output": (
        CROSS, (8, 1), torch.ones(8, 1), CLASSES_OR.format("of several classes") + "name MeanSquaredError"
    ),
    "numbers that would be broadcast": (SQUARE, (8, 5), torch.ones(8), AS_MANY),
    "numbers in another order": (SQUARE, (8, 2, 3), torch.ones(8, 3, 2), AS_MANY),
    "numbers of other samples": (SQUARE, (5, 8), torch.ones(8, 5), AS_MANY),
    "neither numbers nor classes": (
        SQUARE, (4, 5, 6), TOKENS, AS_MANY + ", or of classes outputs of shape [4, 6, classes]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_shapes_that_do_not_fit_are_refused(case):
    name, shape, targets, expected = UNFIT[case]
    kind = str(targets.dtype).removeprefix("torch.")
    with pytest.raises(InvalidConfiguration) as refused:
        build_loss(Loss(name=name), nn.Identity()).sum(torch.zeros(shape), targets, torch.ones(len(targets)))
    assert str(refused.value) == HAVE.format(name, list(shape), list(targets.shape), kind) + expected


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["CrossEntropy", "MeanSquaredError"])
def test_losses_of_half_precision_are_summed_in_single_precision(name, compiled):
    many = torch.randn(4096, 5, generator=GENERATOR).bfloat16()
    targets = torch.arange(4096) % 5
    of = build_loss(Loss(name=name), nn.Identity(), compiled)
    half, double = (of.sum(outputs, targets, torch.ones(4096)) for outputs in (many, many.double()))
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(double.item(), rel=1e-6)


def test_so_are_those_of_a_vocabulary_that_is_cut(mesh):
    logits, targets = torch.randn(4096, 5, generator=GENERATOR).bfloat16(), torch.arange(4096) % 5
    of = build_loss(Loss(), nn.Identity())
    cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    half, double = (of.sum(outputs, targets, torch.ones(4096)) for outputs in (cut, logits.double()))
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(double.item(), rel=1e-6)
    half.backward()
    assert cut.grad.dtype is torch.bfloat16


def test_a_vocabulary_that_is_cut_wants_classes(mesh):
    cut = distribute_tensor(LOGITS, mesh, [Shard(1)])
    with pytest.raises(InvalidConfiguration) as refused:
        build_loss(Loss(), nn.Identity()).sum(cut, LOGITS.softmax(-1), ONES)
    assert str(refused.value) == (
        "`parallelism.vocabularyParallel`: the targets are probabilities (float64), expected classes, which are whole "
        "numbers: leave it out"
    )


@pytest.mark.parametrize(
    ("loss", "targets", "figures"),
    [
        ("CrossEntropy", CLASSES, {"loss", "accuracy"}),
        ("CrossEntropy", LOGITS.softmax(-1), {"loss"}),
        ("MeanSquaredError", CLASSES, {"loss", "accuracy"}),
        ("MeanSquaredError", NUMBERS, {"loss"}),
        ("MeanSquaredError", LOGITS, {"loss"}),
    ],
)
def test_outputs_that_are_scores_have_an_accuracy(loss, targets, figures):
    builtin = {"model": {"name": "mlp"}, "data": {"name": "digits"}}
    task = Supervised(Training.model_validate(small(**builtin, loss={"name": loss})))
    task.use_loss_of(nn.Identity())
    batch = (LOGITS, targets)
    with torch.no_grad():
        found = task.evaluate(nn.Identity(), Microbatch(batch, ONES, task.weight(batch, ONES), 8))
    assert found.keys() == figures
    assert all(float(mean.sum) >= 0 and float(mean.weight) in (8, 40) for mean in found.values())
    known = task.has_figure("accuracy", Datasets([], [(LOGITS[0], targets[0])]))
    assert known in ("accuracy" in figures, None)


SEQUENCE = torch.tensor([1, 2, IGNORED, 0])


@pytest.mark.parametrize(
    ("loss", "targets", "has"),
    [
        ({}, SEQUENCE, True),
        ({"labelSmoothing": 0.1}, SEQUENCE, False),
        ({"name": "MeanSquaredError"}, SEQUENCE, False),
        ({"name": "Model"}, SEQUENCE, False),
        ({}, CLASSES[0], False),
        ({}, LOGITS[0].softmax(-1), False),
    ],
)
def test_the_cross_entropy_of_tokens_has_a_perplexity(loss, targets, has):
    builtin = {"model": {"name": "gpt"}, "data": {"name": "text"}}
    task = Supervised(Training.model_validate(small(**builtin, loss=loss)))
    samples = [(SEQUENCE, targets)]
    assert task.has_figure(PERPLEXITY, Datasets(samples, samples)) is has
    assert task.has_figure(PERPLEXITY, Datasets(samples, None)) is False


@pytest.mark.parametrize(
    ("loss", "figures"), [(0.0, {PERPLEXITY: 1.0}), (700.0, {PERPLEXITY: math.exp(700)}), (710.0, {}), (math.nan, {})]
)
def test_a_perplexity_that_is_not_finite_is_left_out(loss, figures):
    assert perplexity_of(loss) == figures


class Judging(nn.Module):
    """A model whose loss is what it is made with."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss


def distances(outputs, targets):
    return (outputs.argmax(-1) - targets).abs().bfloat16()


class TestModelsOwn:
    OWN = Loss(name="Model")

    def test_it_is_the_loss_of_each_target_that_counts(self):
        targets = TOKENS.clone()
        targets[0, 2:] = targets[3, :] = IGNORED
        counted = (TOKEN_LOGITS.argmax(-1) - TOKENS).abs().double()[targets != IGNORED]
        found = mean(self.OWN, TOKEN_LOGITS, targets, torch.ones(4), Judging(distances))
        assert found == pytest.approx(counted.mean().item(), rel=1e-6)
        assert found > 0

    def test_of_numbers_it_is_the_loss_of_each_sample(self):
        outputs, targets = torch.randn(2, 8, 5, generator=GENERATOR, dtype=torch.float64)
        model = Judging(lambda outputs, targets: (outputs - targets).square().mean(1))
        assert mean(self.OWN, outputs, targets, SOME, model) == pytest.approx(
            functional.mse_loss(outputs[:5], targets[:5]).item()
        )

    def test_a_module_is_one_too(self):
        model = Judging(nn.CrossEntropyLoss(reduction="none"))
        expected = functional.cross_entropy(LOGITS, CLASSES)
        assert mean(self.OWN, LOGITS, CLASSES, ONES, model) == pytest.approx(expected.item())

    @pytest.mark.parametrize(
        ("answer", "found"),
        [(torch.zeros(()), r"a tensor of shape \[\]"), (torch.zeros(4), r"\[4\]"), (1.5, "a float")],
    )
    def test_anything_else_is_refused(self, answer, found):
        expected = rf"Judging\.loss\(outputs, targets\) returned .*{found}, expected \[8\]: a loss for each target"
        with pytest.raises(InvalidConfiguration, match=expected):
            mean(self.OWN, LOGITS, CLASSES, ONES, Judging(lambda outputs, targets: answer))

    def test_a_model_without_one_is_refused(self):
        with pytest.raises(InvalidConfiguration, match="the model Identity has no method `loss"):
            build_loss(self.OWN, nn.Identity())
