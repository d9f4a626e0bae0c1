"""Layers with experts in a pipeline: they learn which of the microbatches in flight is computed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.stage import PipelineStage

from disttrain_trainer.moe.step import RoutingOfStep

ContextOf = Callable[[Tensor], AbstractContextManager[None]]


def attach_routing(stage: PipelineStage, routing: RoutingOfStep, weights_of: Callable[[int], Tensor]) -> None:
    """From now on, with every pass of the stage. `weights_of`: samples' weights by the number of the microbatch."""

    def with_context(work: Callable[..., Any], context_of: ContextOf) -> Callable[..., Any]:
        @wraps(work)
        def with_weights(number: int, *arguments: Any, **options: Any) -> Any:
            with context_of(weights_of(number)):
                return work(number, *arguments, **options)

        return with_weights

    stage.forward_one_chunk = with_context(stage.forward_one_chunk, routing.microbatch)  # type: ignore[method-assign]
    stage.backward_one_chunk = with_context(stage.backward_one_chunk, routing.again)  # type: ignore[method-assign]
    stage.backward_weight_one_chunk = with_context(stage.backward_weight_one_chunk, routing.again)  # type: ignore[method-assign]
