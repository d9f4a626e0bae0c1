"""Microbatches that flow through a pipeline without a flush between updates: PipeDream and PipeDream-2BW.

The order of computations and the versions of the weights are stage_schedule.py's. Each rank follows its own plan and
waits for nobody but its neighbours, and for the replicas of its stage where gradients are averaged; so ranks are in
different steps, and what concerns all of them comes later (step_agreement.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.parallel.data_parallel import average_gradients
from disttrain_trainer.parallel.pipedream.messages import Inbox, Outbox
from disttrain_trainer.parallel.pipedream.metrics import Meter
from disttrain_trainer.parallel.pipedream.pending_sums import PendingSums
from disttrain_trainer.parallel.pipedream.stage_schedule import Plan
from disttrain_trainer.parallel.pipedream.step_agreement import Batch, Listener, RankStep, StepAgreement
from disttrain_trainer.parallel.pipedream.versions import Versions
from disttrain_trainer.parallel.pipeline.part import PipelinePart
from disttrain_trainer.parallel.pipeline.simulate import Kind


class Work(Listener, Protocol):
    """Interface of the flow to its caller. Steps count from 0 since the pipeline was filled."""

    judges: bool
    """Whether steps may be skipped: each is judged before the last gradient of it goes to the stage before."""

    def load(self, step: int) -> list[Microbatch]:
        """This replica's microbatches of a step."""

    def is_used(self, loss: float) -> bool:
        """Whether a step with this mean loss is to be used; asked on the last stage alone, for each step in order."""

    def update(self, step: int) -> None:
        """Apply this rank's gradients."""

    def skip(self, step: int) -> None:
        """Drop this rank's gradients."""


@dataclass
class _Step:
    """A step of which microbatches are under way in the first or the last stage."""

    microbatches: list[Microbatch]
    own: float
    """Samples or tokens of this replica."""
    total: float
    """The same of all replicas, on the last stage."""
    loss: Tensor
    """This rank's part of the mean."""


@dataclass
class _UnderWay:
    """A microbatch between its two passes."""

    inputs: Tensor
    result: Tensor
    """Outputs, in the last stage the loss."""


class _Judged(NamedTuple):
    """A step that was judged in this stage."""

    norm: Tensor
    """2-norm of the stage's gradient."""
    skipped: bool


@dataclass
class Flow(PipelinePart):
    """This rank's stage, which keeps versions of its weights. The replicas of a stage follow one plan."""

    plan: Plan
    module: nn.Module
    """The user's model, cut down to this rank's stage."""
    versions_of_stages: Mapping[int, int]
    """How many each stage holds in theory."""
    timeout: timedelta
    _under_way: dict[int, _UnderWay] = field(default_factory=dict)
    _steps: dict[int, _Step] = field(default_factory=dict)
    _judged: _Judged | None = None
    """The step of which all gradients are there, where steps are judged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self._stage,) = self.stages.values()
        self._parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._versions = Versions(self.module)
        self._meter = Meter(self.world.device, self.plan.stage)
        sums, figures = (PendingSums(dist.new_group(backend="gloo", timeout=self.timeout)) for _ in range(2))
        self._agreement = StepAgreement(
            self.world, self.plan.lag, sums, figures, self._meter.take, self.versions_of_stages
        )
        self._connect()

    @property
    def stopping(self) -> bool:
        """Whether some rank wanted all to end in the last run; alike on every rank."""
        return self._agreement.stopping

    @property
    def saving(self) -> bool:
        """Whether some rank wanted a checkpoint in the last run; alike on every rank."""
        return self._agreement.saving

    def run(self, steps: int, work: Work) -> Iterator[Batch]:
        """Fill the pipeline, take up to so many steps, and drain it. Yields steps as they become known to all ranks;
        those from one on that is not finite when the pipeline is drained."""
        self._work, self._forwarded, done = work, 0, 0
        self._agreement.open(steps, work)
        self._versions.restart()
        with self._meter.flowing():
            for action in self.plan.actions(lambda number: self._agreement.admits(self._step_of(number))):
                if action.kind is Kind.FORWARD:
                    self._forward(action.microbatch)
                    continue
                self._backward(action.microbatch)
                if self.plan.ends_update(action.microbatch):
                    self._update(done)
                    done += 1
                    yield from self._agreement.take()
            for outbox in (self._outputs, self._gradients_back):
                if outbox is not None:
                    outbox.settle()
        rest = self._agreement.close(done)
        self._versions.restart()
        yield from rest

    def _forward(self, number: int) -> None:
        step, at = divmod(number, self.plan.per_update)
        if at == 0 and (self.first or self.last):
            self._steps[step] = self._load(step)
        inputs = self._inputs_of(number, step, at)
        with self._meter.computing(), self._versions.using(self.plan.version(number)):
            if self.last:
                result = self._loss_of(inputs, self._steps[step], at)
            else:
                result = self._stage(inputs)
        self._under_way[number] = _UnderWay(inputs, result)
        self._forwarded += 1
        if self._outputs is not None and self._gradients is not None:
            self._outputs.send(result.detach())
            self._gradients.take_form(result)
            self._gradients.expect()

    def _backward(self, number: int) -> None:
        passed, version = self._under_way.pop(number), self.plan.version(number)
        gradient = None
        if self._gradients is not None:
            gradient = self._gradients.receive()
            if number + 1 < self._forwarded:
                self._gradients.expect()
        # What is computed anew for it uses the same version, too.
        with self._meter.computing(), self._versions.using(version):
            torch.autograd.backward(passed.result, gradient)
        judges = self._work.judges and self.plan.ends_update(number)
        if not judges:
            self._send_back(passed.inputs)
        self._versions.take_gradients(version)
        if judges:
            self._judged = self._judge(self._step_of(number), gradient)
            self._send_back(passed.inputs)
        self._meter.passed(self._versions.newest - version)

    def _judge(self, step: int, gradient: Tensor | None) -> _Judged:
        """Judge a step of which all gradients are there; all replicas of this stage find the same.

        The last stage judges by the loss, each by whether its gradient is finite. gradient: of the stage behind, which
        says by one that is not finite that it makes no update.
        """
        used = self._work.is_used(self._mean_loss(step)) if gradient is None else bool(gradient.isfinite().all())
        if not used:
            # Replicas that have heard otherwise find it in the average.
            for value in self._gradients_of_stage():
                value.fill_(torch.nan)
        norm = self._average()
        return _Judged(norm, not (used and bool(norm.isfinite())))

    def _average(self) -> Tensor:
        """Average the stage's gradient over its replicas, and return its 2-norm."""
        average_gradients(self._parameters, self.world)
        with self._meter.computing():
            return torch.nn.utils.get_total_norm(self._gradients_of_stage())

    def _gradients_of_stage(self) -> list[Tensor]:
        return [value.grad for value in self._parameters if value.grad is not None]

    def _send_back(self, inputs: Tensor) -> None:
        """Send the stage before, if there is one, the gradient of a microbatch."""
        if self._gradients_back is None:
            return
        found = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
        if self._judged is not None and self._judged.skipped:
            found = torch.full_like(inputs, torch.nan)
        self._gradients_back.send(found)

    def _mean_loss(self, step: int) -> float:
        """Return the mean loss of all replicas, on the last stage."""
        loss = self._steps[step].loss.clone()
        if self.world.mesh.replicate > 1:
            dist.all_reduce(loss, group=self.world.device_mesh.get_group("replicate"))
        return float(loss)

    def _update(self, number: int) -> None:
        judged, self._judged = self._judged or _Judged(self._average(), skipped=False), None
        with self._meter.computing():
            self._versions.make_room(self.plan.needed(number))
            (self._work.skip if judged.skipped else self._work.update)(number)
            self._versions.updated()
        self._meter.holds(self._versions)
        self._agreement.send(number, self._rank_step(self._steps.pop(number, None), judged))

    def _load(self, number: int) -> _Step:
        """The microbatches of a step; replicas of the last stage exchange the weights of their samples."""
        microbatches = self._work.load(number)
        own = sum(microbatch.weight for microbatch in microbatches)
        total = torch.tensor(own, dtype=torch.float64)
        if self.last and self.world.mesh.replicate > 1:
            dist.all_reduce(total, group=self.world.device_mesh.get_group("replicate"))
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device.torch)
        return _Step(microbatches, own, float(total) or 1.0, loss)

    def _inputs_of(self, number: int, step: int, at: int) -> Tensor:
        if self._inputs is None:
            return self._steps[step].microbatches[at].inputs
        inputs = self._inputs.receive().requires_grad_()
        if self._agreement.admits_already(self._step_of(number + 1)):
            self._inputs.expect()
        return inputs

    def _loss_of(self, inputs: Tensor, step: _Step, at: int) -> Tensor:
        """Return the loss of the last stage's inputs, whose average over replicas, summed over a step's microbatches,
        is the mean loss of the step."""
        batch = step.microbatches[at]
        with self.loss.summing(batch.targets, batch.weights):
            outputs = self._stage(inputs)
        with self.precision.autocast():
            loss = self.loss.sum(outputs, batch.targets, batch.weights) / step.total
        step.loss += loss.detach()
        return loss * self.world.mesh.replicate

    def _rank_step(self, step: _Step | None, judged: _Judged) -> RankStep:
        square = judged.norm.double().square() / self.world.mesh.replicate
        if step is None or not self.world.counts_replica:
            nothing = torch.zeros_like(square)
            return RankStep(nothing, square, 0.0, 0.0, nothing, judged.skipped)
        samples = sum(microbatch.samples for microbatch in step.microbatches)
        own_loss = step.loss * (step.total / (step.own or 1.0))
        return RankStep(step.loss, square, step.own, samples, own_loss, judged.skipped)

    def _step_of(self, microbatch: int) -> int:
        return microbatch // self.plan.per_update

    def _connect(self) -> None:
        """Neighbours, with a group for each direction: in one, NCCL would let each wait for what the other sends."""
        forwards = self._group
        for ranks in self.world.mesh.groups("pipeline"):
            group = dist.new_group(ranks, timeout=self.timeout)
            if self.world.rank in ranks:
                backwards = group
        stage, channel, depth = self.plan.stage, self.world.device.channel, self.plan.stages + 1
        self._inputs = self._gradients_back = self._outputs = self._gradients = None
        if not self.first:
            below = self._global_rank(stage - 1)
            self._inputs = Inbox(below, forwards, channel)
            self._gradients_back = Outbox(below, backwards, depth, announces=False)
        if not self.last:
            above = self._global_rank(stage + 1)
            self._outputs = Outbox(above, forwards, depth, announces=True)
            self._gradients = Inbox(above, backwards, channel)
