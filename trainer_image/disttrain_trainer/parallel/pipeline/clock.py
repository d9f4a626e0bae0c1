"""How long a rank computes in a step of a pipeline, and how long the step takes: the bubble is the rest."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed.pipelining.stage import PipelineStage

from disttrain_trainer.parallel.pipeline.bubble import Measured
from disttrain_trainer.parallel.pipeline.simulate import Kind
from disttrain_trainer.runtime.device import Device, Mark

_Spans = list[tuple[Mark, Mark]]


class StageClock:
    """Times of this rank's stages since they were last taken."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._actions: dict[tuple[Kind, int], _Spans] = defaultdict(list)
        self._steps: _Spans = []

    def watch(self, stage: PipelineStage) -> None:
        """Time every computation of the stage from now on; its waiting for others lies outside of them."""
        index = stage.stage_index
        stage.forward_one_chunk = self._timed(stage.forward_one_chunk, lambda _: (Kind.FORWARD, index))  # type: ignore[method-assign]
        stage.backward_one_chunk = self._timed(  # type: ignore[method-assign]
            stage.backward_one_chunk,
            lambda options: (Kind.BACKWARD if options.get("full_backward", True) else Kind.INPUTS, index),
        )
        stage.backward_weight_one_chunk = self._timed(  # type: ignore[method-assign]
            stage.backward_weight_one_chunk, lambda _: (Kind.PARAMETERS, index)
        )

    def prolong_forward(self, stage: int) -> None:
        """The stage's latest forward pass lasts until now: the loss, which follows at once, is a part of it."""
        spans = self._actions.get((Kind.FORWARD, stage))
        # torch computes a loss before the first pass, too, to see its shapes.
        if spans:
            begin, _ = spans.pop()
            spans.append((begin, self._device.mark()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """A pass through the pipeline runs inside."""
        begin = self._device.mark()
        yield
        self._steps.append((begin, self._device.mark()))

    def computed(self) -> float:
        """Return the seconds of all computations since the last `take`, which the device has done."""
        return sum(self._sum(spans) for spans in self._actions.values())

    def take(self) -> Measured:
        """Return the measurements since the last call."""
        self._device.synchronize()
        total = self._sum(self._steps)
        actions = {key: (self._sum(spans), len(spans)) for key, spans in self._actions.items()}
        self._steps.clear()
        self._actions.clear()
        return Measured(total, actions)

    def _sum(self, spans: _Spans) -> float:
        return sum(self._device.seconds(begin, end) for begin, end in spans)

    def _timed(
        self, work: Callable[..., Any], name: Callable[[dict[str, Any]], tuple[Kind, int]]
    ) -> Callable[..., Any]:
        @wraps(work)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self._device.mark()
            result = work(*arguments, **options)
            self._actions[name(options)].append((begin, self._device.mark()))
            return result

        return timed
