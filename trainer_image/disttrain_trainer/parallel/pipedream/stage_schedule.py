"""Order of a stage's computations in a pipeline without flush, and the version of the weights of each: arithmetic.

Microbatches, updates and versions count from 0 since the pipeline was last filled; version v has v updates behind it.

1F1B without flush (PipeDream, Narayanan et al., SOSP 2019, sections 3.2 and 3.3): stage s of p computes p - s forward
passes, then a backward and a forward pass in turn, for ever. A backward pass uses the weights of its forward pass:

- stashing: a microbatch meets in each stage the version that is the newest there, p - 1 - s updates old;
- vertical sync: in every stage the version that it met in the first one, p - 1 updates old;
- double buffering (PipeDream-2BW, Narayanan et al., ICML 2021, section 3.1): all microbatches of an update use the
  version before the newest, W(k + 1) = W(k) - rate x gradient(W(k - 1)).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Parallelism, PipelineSchedule
from disttrain_api.pipeline import schedule_of, stages_of
from disttrain_trainer.parallel.pipeline.simulate import Action, Kind


class Weights(Enum):
    """Which version a microbatch uses."""

    STASHED = auto()
    VERTICAL_SYNC = auto()
    DOUBLE_BUFFERED = auto()


@dataclass(frozen=True)
class Plan:
    """The plan of one stage."""

    weights: Weights
    stage: int
    stages: int
    per_update: int = 1
    """Microbatches whose gradients are summed for an update."""

    def actions(self, admitted: Callable[[int], bool]) -> Iterator[Action]:
        """Forward and backward passes in order, until no more microbatches are `admitted` and all are through.

        `admitted` is asked for each microbatch when its forward pass is due; after the first one that is not, no more.
        """
        ahead, forward, more = self.stages - self.stage, 0, True
        for number in count():
            while more and forward < number + ahead:
                more = admitted(forward)
                if more:
                    yield Action(Kind.FORWARD, self.stage, forward)
                    forward += 1
            if number == forward:
                return
            yield Action(Kind.BACKWARD, self.stage, number)

    def ends_update(self, microbatch: int) -> bool:
        """Whether an update follows the backward pass of this microbatch."""
        return (microbatch + 1) % self.per_update == 0

    def version(self, microbatch: int) -> int:
        """The version that both passes of a microbatch use in this stage."""
        if self.weights is Weights.DOUBLE_BUFFERED:
            return max(0, microbatch // self.per_update - 1)
        return max(0, microbatch - self._ahead) // self.per_update

    def needed(self, update: int) -> range:
        """The older versions that are still needed after an update: by microbatches under way, or yet to come."""
        newest = update + 1
        return range(min(newest, self.version(newest * self.per_update)), newest)

    @property
    def versions(self) -> int:
        """How many versions the stage holds when the pipeline is full, the newest included."""
        if self.weights is Weights.DOUBLE_BUFFERED:
            return 2
        return -(-self._ahead // self.per_update) + 1

    @property
    def lag(self) -> int:
        """Updates after which every stage has passed one, before the stage has to decide on what follows them.

        When the first stage admits a microbatch, all others have computed the backward pass of the one that came p
        before it.
        """
        return -(-self.stages // self.per_update)

    @property
    def _ahead(self) -> int:
        """Microbatches that enter the stage between the two that a version's age is counted from."""
        return self.stages - 1 - (0 if self.weights is Weights.VERTICAL_SYNC else self.stage)


def plans_of(parallelism: Parallelism, batch: Batch) -> list[Plan]:
    """The plan of every stage."""
    settings, stages = parallelism.pipeline, stages_of(parallelism)
    if schedule_of(parallelism) is PipelineSchedule.PIPE_DREAM_2BW:
        weights = Weights.DOUBLE_BUFFERED
    elif settings is not None and settings.vertical_sync:
        weights = Weights.VERTICAL_SYNC
    else:
        weights = Weights.STASHED
    return [Plan(weights, stage, stages, batch.passes) for stage in range(stages)]
