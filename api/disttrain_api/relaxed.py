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
    """SGD whose gradient is the replicas' average change since the last average (DiLoCo)."""

    learning_rate: Factor = 0.7
    """Learning rate of the outer steps."""
    momentum: Momentum = 0.9
    """Nesterov momentum from outer step to outer step."""


class LocalSgd(ApiModel):
    """Settings of LocalSGD."""

    period: Period = 8
    """Steps between two averages of the parameters."""
    warmup_steps: WarmupSteps = 0
    """First steps, with gradients summed as in AllReduce."""
    global_period: Period | None = None
    """Steps between averages of all replicas; `period` then counts for those of a pod."""
    optimizer_state: OptimizerState = OptimizerState.KEEP
    """What happens to it at an average."""
    outer_optimizer: OuterOptimizer | None = None
    """Applied to the replicas' average change. Absent: use the plain average."""


class Bmuf(ApiModel):
    """Settings of BMUF, block-wise model update filtering."""

    period: Period = 8
    """Steps of a block."""
    warmup_steps: WarmupSteps = 0
    """Blocks that end within so many steps use the plain average."""
    block_momentum: Momentum | None = None
    """Part of a block's update that the next one repeats. Absent: 1 - 1 / replicas."""
    block_learning_rate: Factor = 1.0
    """Factor of a block's average change."""
    nesterov: bool = True
    """Blocks start where the momentum alone would lead."""
    optimizer_state: OptimizerState = OptimizerState.KEEP
    """What happens to it at an average."""
