"""`training.loss.chunks`: the loss and all gradients are those of whole logits, which never exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_api.builtin import GptConfig
from disttrain_api.training import Training
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.losses import IGNORED, weight_of
from disttrain_trainer.models.gpt import model as gpt
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.supervised import Supervised
from tests.unit.trainer.worlds import small

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 8, 8, 50
SMOOTHED = {"labelSmoothing": 0.1}


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Tagger(nn.Module):
    """Tokens [B, T] -> logits [B, T, V], with a bias and a scale of the logits; the last layer may be frozen."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(not frozen)
        self.last = Half()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.head(self.embed(tokens)))

    def output_layers(self) -> list[nn.Module]:
        return [self.head, self.last]


def tied() -> nn.Module:
    return gpt.build(
        GptConfig(vocabulary_size=VOCABULARY, layers=1, heads=2, width=WIDTH, sequence_length=LENGTH, tie_weights=True)
    )


MODELS = {"tied": tied, "biased and scaled": Tagger, "frozen": lambda: Tagger(frozen=True)}


@pytest.fixture
def microbatch() -> Microbatch:
    """The last sample is padding, and most targets of the first are ignored."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 2:] = IGNORED
    weights = torch.tensor([1.0, 1.0, 0.0])
    return Microbatch((inputs, targets), weights, weight_of(targets, weights), 2)


def made(model: nn.Module, *, at_once: bool = True, compiled: bool = False, **loss: object) -> Supervised:
    """The task, whose loss the model's layers know."""
    task = Supervised(Training.model_validate(small(loss=loss, compile=compiled)))
    task.use_loss_of(model).take_over(at_once=at_once)
    return task


def built(name: str = "tied") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def of_step(task: Supervised, model: nn.Module, microbatch: Microbatch) -> dict[str, Tensor]:
    """The mean loss, and what it leaves in the parameters."""
    loss = task.loss(model, microbatch).sum / microbatch.weight
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("loss", [{}, SMOOTHED], ids=["plain", "smoothed"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "anew"])
@pytest.mark.parametrize("chunks", [2, 5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_whole_logits(microbatch, name, chunks, at_once, loss):
    whole, cut = built(name), built(name)
    expected = of_step(made(whole, **loss), whole, microbatch)
    found = of_step(made(cut, at_once=at_once, chunks=chunks, **loss), cut, microbatch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_gradients_add_up_over_microbatches(microbatch):
    whole, cut = built(), built()
    tasks = made(whole), made(cut, chunks=3)
    for task, model in zip(tasks, (whole, cut), strict=True):
        for _ in range(2):
            found = of_step(task, model, microbatch)
        del found["loss"]
        model.found = found
    torch.testing.assert_close(cut.found, whole.found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_evaluations_are_those_of_whole_logits(microbatch, name):
    """Loss and accuracy; the log-likelihoods of choices, which no smoothing changes."""
    model, other = built(name), built(name)
    whole, cut = made(model, **SMOOTHED), made(other, chunks=5, **SMOOTHED)
    with torch.no_grad():
        expected, found = whole.evaluate(model, microbatch), cut.evaluate(other, microbatch)
        scores = [task.token_losses(one, microbatch) for task, one in ((whole, model), (cut, other))]
    assert found.keys() == expected.keys() == {"loss", "accuracy"}
    for figure, mean in expected.items():
        assert float(found[figure].sum) == pytest.approx(float(mean.sum), abs=1e-12)
        assert float(found[figure].weight) == float(mean.weight)
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_call_beside_the_steps_has_logits(microbatch, name):
    """Those of callbacks, for example."""
    model, other = built(name), built(name)
    task = made(other, chunks=2)
    of_step(task, other, microbatch)
    torch.testing.assert_close(other(microbatch.inputs), model(microbatch.inputs))


class Largest(TorchDispatchMode):
    """The most elements that a result of any operator has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        found = operator(*arguments, **(options or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return found


@contextmanager
def saved() -> Iterator[list[int]]:
    """How many elements each tensor has that is kept for a backward pass."""
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


LOGITS = BATCH * LENGTH * VOCABULARY


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "anew"])
def test_whole_logits_never_exist(microbatch, at_once):
    model = built()
    with Largest() as largest, saved() as sizes:
        of_step(made(model, at_once=at_once, chunks=4, **SMOOTHED), model, microbatch)
    assert 0 < max(largest.elements, *sizes) < LOGITS


def test_evaluations_never_have_whole_logits_either(microbatch):
    model = built()
    task = made(model, chunks=4)
    with Largest() as largest, torch.no_grad():
        task.evaluate(model, microbatch)
        task.token_losses(model, microbatch)
    assert 0 < largest.elements < LOGITS


def test_without_chunks_they_do(microbatch):
    """So that the tests above can fail."""
    model = built()
    with Largest() as largest, saved() as sizes:
        of_step(made(model), model, microbatch)
    assert (largest.elements, max(sizes)) == (LOGITS, LOGITS)


def distance_of(found: Tensor, expected: Tensor) -> float:
    """In parts of the 2-norm."""
    return float(torch.dist(found.double(), expected) / torch.linalg.vector_norm(expected))


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "anew"])
def test_in_bf16_losses_are_fp32_and_gradients_as_near_as_without(microbatch, at_once):
    exact = built("biased and scaled")
    expected = of_step(made(exact), exact, microbatch)
    losses, distances = [], []
    for settings in ({}, {"chunks": 4}):
        model = built("biased and scaled").float()
        task = made(model, at_once=at_once, **settings)
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(model, microbatch).sum / microbatch.weight
        loss.backward()
        losses.append(loss.detach())
        distances.append(distance_of(model.head.weight.grad, expected["head.weight"]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert 0.5 * distances[0] < distances[1] < 1.5 * distances[0]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "anew"])
def test_gradients_of_weights_in_bf16_are_summed_in_fp32(microbatch, at_once):
    """As FSDP2 gathers them: added up in BF16, a gradient loses what is small beside it."""
    inputs, targets = (one.repeat(40, 1) for one in microbatch.batch)
    many = Microbatch((inputs, targets), torch.ones(len(inputs)), float(len(inputs) * LENGTH), len(inputs))
    exact = built("biased and scaled").to(torch.bfloat16).double()
    expected = of_step(made(exact), exact, many)["head.bias"]
    model = built("biased and scaled").to(torch.bfloat16)
    found = of_step(made(model, at_once=at_once, chunks=len(inputs)), model, many)["head.bias"]
    assert found.dtype == torch.bfloat16
    assert distance_of(found, expected) < 2**-8


@pytest.mark.parametrize("compiled_layers", [False, True], ids=["layers", "whole"])
def test_compiled_it_computes_the_same(microbatch, compiled_layers):
    whole, cut = (built().float() for _ in range(2))
    expected = of_step(made(whole), whole, microbatch)
    task = made(cut, compiled=True, chunks=3)
    for layer in cut.layers():
        layer.compile()
    if compiled_layers:
        task.compile_with_model()
    torch.testing.assert_close(of_step(task, cut, microbatch), expected, rtol=1e-5, atol=1e-6)


def test_a_second_backward_pass_is_an_error(microbatch):
    model = built()
    loss = made(model, chunks=2).loss(model, microbatch).sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="there is one backward pass"):
        loss.backward()


def test_a_model_that_names_no_output_layers_is_refused():
    task = Supervised(Training.model_validate(small(loss={"chunks": 2})))
    with pytest.raises(InvalidConfiguration, match=r"`training.loss.chunks`: the model Linear has no method `output_l"):
        task.use_loss_of(nn.Linear(3, 5))


@pytest.mark.parametrize(
    ("layers", "found"),
    [([], "none"), ([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)], "LayerNorm, Linear")],
    ids=["none", "two with parameters"],
)
def test_output_layers_that_cannot_compute_in_chunks_are_refused(layers, found):
    model = nn.Sequential(*layers)
    model.output_layers = lambda: layers
    task = Supervised(Training.model_validate(small(loss={"chunks": 2})))
    with pytest.raises(InvalidConfiguration, match=rf"Sequential.output_layers\(\) returned {found}; expected a layer"):
        task.use_loss_of(model)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (torch.zeros(BATCH, LENGTH - 1, dtype=torch.int64), r"shape \[3, 7\] and the type int64"),
        (torch.zeros(BATCH, LENGTH, VOCABULARY), r"shape \[3, 8, 50\] and the type float32"),
        (torch.zeros(BATCH, LENGTH), r"shape \[3, 8\] and the type float32"),
    ],
    ids=["too short", "probabilities", "numbers"],
)
def test_targets_that_are_no_classes_of_tokens_are_refused(microbatch, targets, found):
    model = built()
    wrong = Microbatch((microbatch.inputs, targets), microbatch.weights, 1.0, 2)
    expected = rf"`training.loss.chunks`: the last layer takes \[3, 8, 8\], the targets have the {found}; expected"
    with pytest.raises(InvalidConfiguration, match=expected):
        made(model, chunks=2).loss(model, wrong)
