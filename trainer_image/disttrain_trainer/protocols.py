"""All that a user's objects may offer to the trainer, on one page, as typed Protocols.

What is optional is a Protocol of its own: the trainer asks `offered(owner, "name")` and goes without where there is
nothing. A Task brings its own model, data and loss (`training.task`); without one, `training.model`, `training.data`
and `training.loss` name them, and the built-in supervised task joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

if TYPE_CHECKING:
    from disttrain_api.transformers_config import TransformersConfig

Batch = Any
"""What `collate` returns: tensors, in mappings, sequences and dataclasses of any depth."""


def offered(owner: object, name: str) -> Callable[..., Any] | None:
    """Return the method or module `name` that the user's object offers; None where it offers none."""
    found = getattr(owner, name, None)
    return found if callable(found) else None


# --- values ----------------------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A figure as a sum and what to divide it by; both are summed over all ranks and batches first."""

    sum: Tensor | float
    """A scalar; a tensor may stay on the device."""
    weight: Tensor | float
    """A scalar, for example the number of samples that were judged."""


class Loss(NamedTuple):
    """Result of a task's `loss` for a batch."""

    sum: Tensor
    """Scalar: the losses of the batch's samples (or tokens), summed, not averaged. The gradient is that of this sum
    over all ranks and microbatches, divided by the `weight` of all their batches."""
    figures: Mapping[str, Mean] = {}
    """Figures to log beside the loss, by name."""


# --- data ------------------------------------------------------------------------------------------------------------


class MapDataset(Protocol):
    """Samples by index: a length, and a sample at each index below it, alike on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """Return the sample; (input, target) where no task says otherwise."""


class IterableDataset(Protocol):
    """Training samples that are iterated, for what is too large to be numbered. No samples are held out of it."""

    def shard(self, index: int, count: int) -> IterableDataset:
        """Return part `index` of `count`, one for each replica; no two parts have a sample in common. Not called, and
        not needed, where there is one replica."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the samples that come after the present position. One that ends is followed by
        another, from the beginning: the next pass."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position after the samples that were returned so far: plain values and tensors. It is asked for
        before each step, so it should be small."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position; the next call of `__iter__` goes on there."""


class OffersOtherParts(Protocol):
    """An iterable data set that goes on with another number of replicas."""

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the positions of all replicas of the job that wrote the checkpoint, in order, each after as many
        samples. It is called for a part of this job, behind `shard`."""


# --- models ----------------------------------------------------------------------------------------------------------


class OffersLayers(Protocol):
    """A model that names the modules that are gathered, recomputed, placed or made stages of one by one."""

    def layers(self) -> Iterable[nn.Module]:
        """Return modules whose composition is the forward pass."""


class OffersTensorPlan(Protocol):
    """A model whose layers can be cut over a tensor group."""

    def tensor_plan(self, *, sequence: bool, vocabulary: bool) -> Mapping[str, ParallelStyle]:
        """Return a style for each submodule, by name. Raise ValueError where one of the two is not possible."""


class OffersOutputLayers(Protocol):
    """A model whose logits can be computed for some tokens at a time (`training.loss.chunks`)."""

    def output_layers(self) -> Sequence[nn.Module]:
        """Return the modules, in turn, from the last hidden states [..., D] to the outputs [..., V]. The first one
        alone has parameters, and each looks at a token by itself."""


class ContextPart(Protocol):
    """This rank's part of every sequence, of which the ranks of a context group have one each. With `documentMask` of a
    corpus or `packing` of conversations each document is a sequence."""

    degree: int
    """Number of parts."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return where in the whole sequences the `tokens` tokens of a part are: [tokens], int64; where documents
        are kept apart, in their documents: [B, tokens]."""

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor:
        """Return scaled dot-product attention to each token and those before it in the whole sequences, also where
        other ranks have them. [B, H, T, D'] each, T tokens of a part; keys and values may have fewer heads than
        queries. scale: None: 1 / sqrt(D'). Ranks of a group call it together."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """Return `attention(query, key, value)` of the whole sequences. It is called with some of the heads of each,
        and where documents are kept apart for each; keys and values may have fewer heads than queries. Ranks of a group
        call it together. Raises InvalidConfiguration with `contextParallelMethod` Ring, where no rank sees whole
        sequences."""


class OffersContext(Protocol):
    """A model that can compute parts of sequences, which its attention alone puts together."""

    def use_context(self, context: ContextPart) -> None:
        """Compute parts of sequences from now on: those of `context`."""


class OffersJoinedProducts(Protocol):
    """A model that can multiply with several weights at once where it holds them whole."""

    def join_products(self) -> None:
        """Do so from now on. Called for replicas on CPUs, where each rank computes all layers by itself."""


class OffersInitialisation(Protocol):
    """A model that can be built without memory (`model.metaDevice`)."""

    def initialise_layer(self, layer: nn.Module) -> None:
        """Give values to the parameters and buffers that `layer` itself holds."""


class OffersLoss(Protocol):
    """A model with a loss of its own (`loss.name: Model`)."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target, neither summed nor averaged."""


class OffersVocabulary(Protocol):
    """A model of tokens that says which it takes."""

    def vocabulary_size(self) -> int:
        """Return the number of tokens that the model takes. A corpus with more is refused before the first step."""


class OffersNotes(Protocol):
    """A model with something to say about the job."""

    def notes_for_log(self) -> list[str]:
        """Return the lines that the first rank's log has once the model is built."""


class OffersEndTokens(Protocol):
    """A model of tokens that says which end a text."""

    def end_tokens(self) -> list[int]:
        """Return the tokens after which `evaluation.samples` ends a text, beside the tokenizer's."""


class OffersFlopsPerToken(Protocol):
    """A model that says what a forward and backward pass costs."""

    def flops_per_token(self) -> float:
        """Return FLOPs of a token."""


class OffersFlopsPerSample(Protocol):
    """The same by sample."""

    def flops_per_sample(self) -> float:
        """Return FLOPs of a sample."""


# --- tasks -----------------------------------------------------------------------------------------------------------


class Task(Protocol):
    """Model, data and loss of one's own: what `training.task.entrypoint` returns. Modules that are attributes of the
    task (a teacher, a frozen encoder) move to the device in evaluation mode, and are neither trained nor saved.
    """

    def model(self) -> nn.Module:
        """Return the model to train, a new one for each call. The seed is set before."""

    def data(self) -> tuple[MapDataset | IterableDataset, MapDataset | None]:
        """Return samples to train on, and held-out ones or None."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss of a batch on the device. Call `model(…)` itself, not its methods: wrappers see the call."""


class OffersCollate(Protocol):
    """A task that makes batches by itself; otherwise torch.utils.data.default_collate does."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of one to micro-batch-size samples, on the host."""


class OffersWeight(Protocol):
    """A task whose loss is not a mean over samples, for example one over tokens."""

    def weight(self, batch: Batch) -> float:
        """Return what the batch counts for in the mean, from the batch on the host; otherwise its samples count."""


class OffersOptimizer(Protocol):
    """A task with an optimizer of its own, in place of `training.optimizer`."""

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of all these parameters, which may be cut over ranks. `training.lrSchedule` multiplies
        the learning rate that each of its groups has now."""


class OffersEvaluation(Protocol):
    """A task with figures of its own for held-out samples; otherwise `loss` and its figures are reported."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Mean]:
        """Return figures of a batch, without gradient; the key `loss` replaces that of `loss`."""


class OffersTransformersConfig(Protocol):
    """A task whose model is one of transformers, as `disttrain_trainer.models.transformers.model.build` makes them;
    `disttrain export` writes it as files of the library by this."""

    def transformers_config(self) -> TransformersConfig:
        """Return what the model was built of, with its adapters."""


class OffersOwnWeights(Protocol):
    """A task whose model begins with weights of which the task has made something else by then, such as a reference:
    `training.checkpoint.initialFrom`, which would give others to the model alone, is refused."""

    def own_weights(self) -> str:
        """Return what names these weights, for the sentence that refuses the field."""


# --- callbacks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """State of a job when a callback is called: between two steps, on every rank."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """`training.steps`."""
    model: nn.Module
    """What `model` returned, in its present mode; its parameters may be DTensors, cut over ranks."""
    optimizer: torch.optim.Optimizer
    replicas_agree: bool
    """Whether all replicas hold the same model after each step; not where they train alone (LocalSGD, BMUF)."""
    metrics: Mapping[str, float]
    """In `on_step` the line of metrics.jsonl, where one follows this step; in `on_evaluation` the figures."""
    rank: int
    world_size: int


class OffersStart(Protocol):
    """A callback that is called before the first step of each attempt."""

    def on_start(self, moment: Moment) -> None:
        """See Moment. The model is that of the checkpoint, if there is one; `load_state_dict` comes next."""


class OffersStep(Protocol):
    """A callback that is called after each step."""

    def on_step(self, moment: Moment) -> None:
        """See Moment."""


class OffersEvaluationDone(Protocol):
    """A callback that is called after each evaluation."""

    def on_evaluation(self, moment: Moment) -> None:
        """See Moment. The checkpoint of this step is taken before the evaluation; an attempt that resumes from it calls
        this again, with the figures in it, so that the state of the callback misses no evaluation."""


class OffersEvaluating(Protocol):
    """A callback that changes what is evaluated: other weights, an optimizer that has a mode for it."""

    def evaluating(self, moment: Moment) -> AbstractContextManager[object]:
        """Return a context for an evaluation; when it is left, the model must be what it was before."""


class OffersCheckpoint(Protocol):
    """A callback that is called before each checkpoint is taken."""

    def on_checkpoint(self, moment: Moment) -> None:
        """See Moment. What this changes in the callback's state is in the checkpoint."""


class OffersEnd(Protocol):
    """A callback that is called when the job is done."""

    def on_end(self, moment: Moment) -> None:
        """See Moment. The last checkpoint and evaluation are done; not called where a job stops early."""


class OffersState(Protocol):
    """A callback whose state checkpoints hold."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors, which may be DTensors, and plain values, in dictionaries with texts as keys. Tensors in
        dictionaries are kept as torch.distributed.checkpoint keeps those of a model, all else is that of rank 0."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned. Tensors are on the CPU, but where `state_dict` has a DTensor now."""
