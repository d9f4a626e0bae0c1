"""Settings of replicas that train alone and average their parameters now and then: `spec.parallelism.dataParallel`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel

Period = Annotated[int, Field(ge=1, le=1_000_000)]
WarmupSteps = Annotated[int, Field(ge=0, le=1_000_000_000)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class OptimizerState(StrEnum):
    """What becomes of a replica's own optimizer state when parameters are averaged."""

    KEEP = "Keep"
    AVERAGE = "Average"
    RESET = "Reset"


class OuterOptimizer(ApiModel):
    """SGD whose gradient is what the replicas have changed on average since they last met (DiLoCo)."""

    learning_rate: Factor = 0.7
    """Of the outer steps."""
    momentum: Momentum = 0.9
    """Nesterov momentum from outer step to outer step."""


class LocalSgd(ApiModel):
    """Settings of LocalSGD."""

    period: Period = 8
    """Steps between two averages of the parameters."""
    warmup_steps: WarmupSteps = 0
    """First steps, in which gradients are summed as by AllReduce."""
    global_period: Period | None = None
    """Steps between two averages of all replicas; every `period` steps is then those of a pod."""
    optimizer_state: OptimizerState = OptimizerState.KEEP
    """What a replica's own becomes at an average."""
    outer_optimizer: OuterOptimizer | None = None
    """Applied to the replicas' average change. Absent: the average is taken as it is."""


class Bmuf(ApiModel):
    """Settings of BMUF, block-wise model update filtering."""

    period: Period = 8
    """Steps of a block."""
    warmup_steps: WarmupSteps = 0
    """Blocks that end within so many steps take the average as it is."""
    block_momentum: Momentum | None = None
    """Part of a block's update that the next one repeats. Absent: 1 - 1 / replicas."""
    block_learning_rate: Factor = 1.0
    """What a block's average change is multiplied by."""
    nesterov: bool = True
    """Blocks start where the momentum alone would lead."""
    optimizer_state: OptimizerState = OptimizerState.KEEP
    """What a replica's own becomes at an average."""
