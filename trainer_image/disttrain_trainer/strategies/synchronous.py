"""Steps that all ranks take together: DDP, FSDP2, tensor, context and expert parallelism, pipelines with a flush.

What makes one gradient of all ranks' is in the state that build.py makes: wrapped models and pipelines.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

from torch import Tensor

from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.metrics.own_time import PassClock, computes_alone, own_seconds, waits_of
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.metrics.results import StepResult, SumOverRanks
from disttrain_trainer.optim.schedules import learning_rate
from disttrain_trainer.step import (
    accumulate_gradients,
    clip_gradients,
    load_step,
    settle_buckets,
    skip_update,
    update_parameters,
)
from disttrain_trainer.strategies.base import Surroundings


class Batch(NamedTuple):
    """A step's samples, loaded, whose counts are being summed over all ranks."""

    microbatches: list[Microbatch]
    weight: float
    """The sum over this rank's microbatches."""
    samples: float
    """The sum over this rank's microbatches."""
    loading_seconds: float
    counts: Callable[[], list[float]]
    """Weight and samples of all ranks, how many of these want to stop, and to save, the mean loss of the step before,
    and digests of what they have called."""


_LOSS = 4
"""Its place among the counts."""


class Synchronous(SumOverRanks):
    """See `Strategy`. One gradient of all ranks, one update.

    Techniques that compute another gradient derive from it, and replace `compute_gradients` or `end_step`.
    """

    joined = False

    def __init__(self, around: Surroundings, *, own_norms: bool = False) -> None:
        pipeline = around.state.pipeline
        figures = partial(_task_figures, around) if pipeline is None else pipeline.figures
        own_time = self._own_time if around.world.size > 1 else None
        super().__init__(around.world, own_norms, figures, own_time)
        self.stopping = self.saving = False
        self._config, self.state, self._around = around.config, around.state, around
        self._next: Batch | None = None
        self._settled = False
        self._alone = computes_alone(around.config, around.world, around.state)
        waits = waits_of(around.config, around.world, around.state) if own_time is not None else None
        timed = own_time is not None and (self._alone or waits is not None)
        self.clock = PassClock(around.world.device, waits) if timed else None

    def run(self, until: int) -> Iterator[StepResult]:
        self.saving = False
        if not self._settled and self.state.step < until:
            # Not earlier: a callback may freeze parameters when the attempt begins.
            self._settled = True
            always = self._config.job.parallelism.data_parallel.find_unused_parameters
            settle_buckets(self.state, self.world, always_search=always)
        while self.state.step < until:
            batch, self._next = self._next or self._load(self.state.cursor), None
            weight, samples, stopping, saving, _, *digests = batch.counts()
            self._require_same_layers(digests)
            if stopping:
                self.stopping = True
                return
            if saving:
                # The step itself comes after the checkpoint.
                self.saving, self._next = True, batch._replace(counts=partial(list[float], (weight, samples, 0, 0, 0)))
                return
            yield self._step(batch, weight, samples, until)

    def consistent(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing: all ranks hold the parameters of the same step."""
        return nullcontext()

    def _step(self, batch: Batch, weight: float, samples: float, until: int) -> StepResult:
        """Compute the gradient, clip it, and update. weight, samples: of all ranks."""
        state, training = self.state, self._config.training
        rate = learning_rate(training, state.step)
        loss = self.compute_gradients(batch, weight, samples)
        self._around.computed()
        # Before the clip and the update, which hide what the sum of the next counts takes. What is due after `until`
        # looks at the state between two steps.
        if state.layer_order is not None:
            state.layer_order.end_pass()
        if state.step + 1 < until:
            self._next = self._load(state.sampler.advance(state.cursor), loss)
        elif state.layer_order is not None:
            # Before what is due writes it down.
            self._require_same_layers(self.world.sum(*state.layer_order.take()))
        norm = clip_gradients(state, training.max_gradient_norm, self.world)
        judged = 0.0 if state.guard is None else self._mean_loss(loss)
        self._around.agree()
        may_overflow, skipped = state.precision.may_overflow, self._is_skipped(judged, norm)
        if skipped:
            if state.gradient_sum is not None:
                state.gradient_sum.undo()
            skip_update(state)
        else:
            update_parameters(state, rate, norm)
        sent = self.end_step()
        self._around.updated()
        return StepResult(
            step=state.step,
            loss=loss * self.world.counts_outputs,
            weight=weight,
            own_weight=batch.weight,
            gradient_norm=norm,
            samples=samples,
            rate=rate,
            loading_seconds=batch.loading_seconds,
            passes=None if self.clock is None else self.clock.take(),
            gradient_bytes=sent,
            routing=state.routing.take_figures(samples or 1.0, len(batch.microbatches)),
            skipped=skipped,
            may_overflow=may_overflow,
            skipped_steps=None if state.guard is None else state.guard.skipped,
        )

    def _own_loss(self, loss: Tensor | None) -> float:
        """Return this rank's part of the mean loss where steps are judged by it, which takes waiting for the device."""
        return 0.0 if loss is None or self.state.guard is None or not self.world.counts_outputs else float(loss)

    def _mean_loss(self, loss: Tensor) -> float:
        """Return the mean loss over all ranks: it comes with the counts of the next batch, if that is known."""
        return self._next.counts()[_LOSS] if self._next is not None else self.world.sum(self._own_loss(loss))[0]

    def _is_skipped(self, loss: float, norm: Callable[[], Tensor]) -> bool:
        """Whether no update is made of this step; rank 0 says why. Raises NonFiniteLoss after too many."""
        step, guard = self.state.step + 1, self.state.guard
        if guard is None:
            return False
        judged = self.judged_norm(norm)
        if self.state.precision.may_overflow and math.isfinite(loss) and not math.isfinite(judged):
            # The loss scale's, which falls: nothing is wrong with the step.
            return False
        reason = guard.reason_to_skip(step, loss, judged)
        if reason is not None:
            log_first_rank(self.world, f"step {step} is skipped: its {reason}")
        return reason is not None

    def judged_norm(self, norm: Callable[[], Tensor]) -> float:
        """Return the gradient norm by which a step is judged, on all ranks the same. norm: this rank's."""
        return float(norm())

    def _load(self, cursor: Cursor, loss: Tensor | None = None) -> Batch:
        """Load this rank's part of the global batch at `cursor`. loss: this rank's part of the step before it."""
        begin = time.monotonic()
        microbatches = load_step(self.state, self.world, cursor)
        loading = time.monotonic() - begin
        weight = sum(microbatch.weight for microbatch in microbatches)
        samples = sum(microbatch.samples for microbatch in microbatches)
        # One small gloo all-reduce: the weight that the mean loss needs, whether some rank wants to stop or save, and
        # the loss by which the step before is judged.
        order = self.state.layer_order
        digests = () if order is None else order.take()
        wishes = self._around.must_end(), self._around.must_save()
        own = weight * self.world.counts_outputs, samples * self.world.counts_replica
        sums = self.world.sum_later(*own, *wishes, self._own_loss(loss), *digests)
        return Batch(microbatches, weight, samples, loading, sums)

    def _require_same_layers(self, digests: Sequence[float]) -> None:
        """Raise InvalidConfiguration, on all ranks, where they have not called the same layers."""
        if digests and self.state.layer_order is not None:
            self.state.layer_order.require_alike(digests, self.world)

    def compute_gradients(self, batch: Batch, weight: float, samples: float) -> Tensor:
        """Leave the gradient in the parameters; return this rank's part of the mean loss over all samples (tokens)."""
        state = self.state
        if state.gradient_sum is not None:
            state.gradient_sum.begin(state.step, undoable=state.guard is not None)
        parts = self.world.parts
        return accumulate_gradients(state, batch.microbatches, weight or 1.0, samples or 1.0, parts, self.clock)

    def _own_time(self, results: Sequence[StepResult]) -> float:
        """Return the seconds per step that this rank has worked by itself: where it is not known for how long it waits
        for other ranks within its passes, what it took to load samples."""
        if self.clock is not None:
            self.clock.restart()
        pipeline = self.state.pipeline
        computed = pipeline.computed_seconds() / len(results) if pipeline is not None and self._alone else None
        return own_seconds(results, self.world.device, computed)

    def end_step(self) -> int | None:
        """Do what follows the update; return the bytes that this rank has sent, where they are counted."""
        return None if self.state.gradient_sum is None else self.state.gradient_sum.bytes


def _task_figures(around: Surroundings) -> dict[str, float]:
    """Return the task's own figures since they were last asked for. All ranks call it together."""
    if not around.state.task.has_figures:
        return {}
    return {f"task/{name}": value for name, value in around.state.figures.take(around.world).items()}
