"""Content of a worker's push for each range of a server: compressed gradients, or the worker's changes.

begin(task) -> of(server, index), for each range -> settle(who took it in)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from disttrain_api.parallelism import Pushed
from disttrain_trainer.compression.sparse import with_momentum, without
from disttrain_trainer.optim.optimizers import state_names
from disttrain_trainer.parameter_server.protocol.codec import Piece, PushCodec, SparseCodec, build_codec
from disttrain_trainer.parameter_server.protocol.placement import Placement, Segment
from disttrain_trainer.parameter_server.protocol.rows import Rows
from disttrain_trainer.parameter_server.protocol.settings import is_together, settings_of
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.worker.staging import Staging
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.state import State

Parameters = Mapping[str, nn.Parameter]


class Payload(ABC):
    """Content of a push. One task at a time."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._skipped = False

    def begin(self, task: Task, weight: float) -> None:
        """The parameters were pulled; what comes is of this task, of so many samples or tokens."""
        self._skipped = False

    def skip(self) -> None:
        """Nothing of this task is to be pushed, and what is kept stays as it was before."""
        self._skipped = True

    @abstractmethod
    def of(self, server: int, index: int) -> list[Tensor]:
        """Tensors in the host's memory for one range of a server; none where there is nothing to push.

        They are complete once an event of `staging` is past.
        """

    @property
    def kept(self) -> list[Tensor]:
        """Return what is there from one push to the next."""
        return []

    def settle(self, fresh: Sequence[bool]) -> None:  # noqa: B027 - not all keep something
        """All servers have answered; `fresh`: whether each took it in, or had taken in the task before."""

    def _down(self, server: int, index: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.staging.down((server, index, place), tensor) for place, tensor in enumerate(tensors)]


class EmptyPayload(Payload):
    """Content of a rank whose group pushes through its first rank."""

    def of(self, server: int, index: int) -> list[Tensor]:
        return []


class _Kept(NamedTuple):
    residual: Tensor
    velocity: Tensor | None


class GradientPayload(Payload):
    """The parameters' gradients, by a codec.

    What a codec leaves out is kept and added to the next gradient, this worker's own: sent + kept = gradient + formerly
    kept. A server that has not taken a push in has not got it, so what was kept before it stays. Where servers weigh
    gradients (`weighted`), what is kept is weighed, too, so that it counts in the next sum as it would have in its own.
    """

    def __init__(
        self,
        placement: Placement,
        parameters: Parameters,
        codec: PushCodec,
        momentum: float = 0.0,
        *,
        weighted: bool = False,
    ) -> None:
        """`momentum`: of the correction that comes before numbers are chosen; `codec` is a SparseCodec then."""
        super().__init__()
        self._placement, self._parameters, self._codec = placement, parameters, codec
        self._momentum, self._weighted = momentum, weighted
        self._task, self._weight = Task(0, 0), 0.0
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._next: dict[tuple[int, int], _Kept] = {}
        self.rows: Mapping[str, Rows] = {}
        """Gradients of tables, by name; the parameter itself has none then."""

    def begin(self, task: Task, weight: float) -> None:
        super().begin(task, weight)
        self._task, self._weight = task, weight
        self._next = {}
        self.rows = {}

    def of(self, server: int, index: int) -> list[Tensor]:
        segment = self._placement[server][index]
        if self._skipped:
            return []
        if segment.name in self.rows:
            return self._down(server, index, _rows_in(self.rows[segment.name], segment))
        gradient = self._parameters[segment.name].grad
        if gradient is None:
            return []
        piece = Piece(*self._task, server, index)
        values = numbers(gradient.to_dense() if gradient.is_sparse else gradient, segment)
        if not self._codec.feedback:
            return self._down(server, index, self._codec.encode(values, piece))
        return self._with_feedback(values, piece) if self._weight > 0 else []

    @property
    def kept(self) -> list[Tensor]:
        return [tensor for kept in self._kept.values() for tensor in kept if tensor is not None]

    def settle(self, fresh: Sequence[bool]) -> None:
        self._kept |= {place: kept for place, kept in self._next.items() if fresh[place[0]]}
        self._next = {}

    def _with_feedback(self, gradient: Tensor, piece: Piece) -> list[Tensor]:
        place = (piece.server, piece.place)
        kept = self._kept.get(place)
        unit = self._weight if self._weighted else 1.0
        update = with_momentum(gradient, None if kept is None else kept.velocity, self._momentum)
        values = update if kept is None else update + kept.residual / unit
        tensors = self._codec.encode(values, piece)
        sent = self._codec.decode(tensors, values.numel(), values.dtype, piece)
        velocity = None
        if self._momentum and isinstance(self._codec, SparseCodec):
            velocity = without(update, self._codec.places(tensors, values.numel(), piece))
        self._next[place] = _Kept((values - sent) * unit, velocity)
        return self._down(*place, tensors)


class ChangePayload(Payload):
    """Changes of this worker's own update: for each parameter with a gradient its numbers, then the optimizer state in
    order of `state_names`.

    The difference and not the parameters themselves: others may have changed them since they were pulled.
    """

    def __init__(self, placement: Placement, parameters: Parameters, state: State, names: Sequence[str]) -> None:
        super().__init__()
        self._placement, self._parameters, self._names = placement, parameters, names
        self._optimizer = state.optimizer
        self._before: dict[str, list[Tensor]] = {}

    def begin(self, task: Task, weight: float) -> None:
        super().begin(task, weight)
        self._before = {name: [tensor.clone() for tensor in self._tensors(name)] for name in self._parameters}

    def of(self, server: int, index: int) -> list[Tensor]:
        segment = self._placement[server][index]
        if self._skipped or self._parameters[segment.name].grad is None:
            return []
        pairs = zip(self._tensors(segment.name), self._before[segment.name], strict=True)
        return self._down(server, index, [_part(now - before, segment) for now, before in pairs])

    def settle(self, fresh: Sequence[bool]) -> None:
        # As large as the model and its optimizer's state: not beside those of the next task.
        self._before = {}

    def _tensors(self, name: str) -> list[Tensor]:
        parameter = self._parameters[name]
        state = self._optimizer.state.get(parameter, {})
        return [parameter.detach(), *(state[key] for key in self._names)]


def build_payload(config: Config, placement: Placement, parameters: Parameters, state: State) -> Payload:
    """Return the payload that the manifest asks for."""
    if settings_of(config).push is Pushed.PARAMETERS:
        return ChangePayload(placement, parameters, state, state_names(config.training.optimizer))
    compression = config.job.parallelism.data_parallel.compression
    momentum = 0.0 if compression is None else compression.momentum_correction or 0.0
    codec = build_codec(compression, config.training.seed)
    return GradientPayload(placement, parameters, codec, momentum, weighted=is_together(config))


def numbers(values: Tensor, segment: Segment) -> Tensor:
    """The segment's numbers of a parameter or its gradient, in the same memory."""
    return values.detach().reshape(-1)[segment.start : segment.stop]


def _part(values: Tensor, segment: Segment) -> Tensor:
    """The segment's numbers, or the one number that stands for the whole parameter."""
    return values.reshape(-1) if values.dim() == 0 else numbers(values, segment)


def _rows_in(rows: Rows, segment: Segment) -> list[Tensor]:
    """Places within the segment and values of the rows that lie in it; none where there are none."""
    width = rows.values.shape[1]
    first = segment.start // width
    there = (rows.places >= first) & (rows.places < segment.stop // width)
    if not there.any():
        return []
    return [rows.places[there] - first, rows.values[there].reshape(-1)]
