"""When replicas that train alone meet: pure functions of the number of steps that are done."""

from dataclasses import dataclass
from enum import Enum

from disttrain_api.relaxed import Bmuf, LocalSgd


class Averaging(Enum):
    """Whose parameters are averaged after a step."""

    NONE = "none"
    POD = "the replicas of each pod"
    ALL = "all replicas"


@dataclass(frozen=True)
class Plan:
    """Plan of a whole run. Completed steps are counted from 1, beginning ones from 0."""

    period: int
    steps: int
    """All of the run: the last block may be short."""
    global_period: int
    """Equal to `period` where pods do not average by themselves."""
    summed_steps: int = 0
    """First steps, in which gradients are summed (post-local SGD, Lin et al. 2020)."""
    plain_steps: int = 0
    """An averaging within so many steps takes the average as it is (warm-up of BMUF)."""

    @classmethod
    def of(cls, settings: LocalSgd | Bmuf, steps: int) -> "Plan":
        """The plan of a run of so many steps."""
        if isinstance(settings, Bmuf):
            return cls(settings.period, steps, settings.period, plain_steps=settings.warmup_steps)
        longest = settings.global_period or settings.period
        return cls(settings.period, steps, longest, summed_steps=settings.warmup_steps)

    @property
    def block(self) -> int:
        """Return the steps from one averaging of all replicas to the next, once they train alone."""
        return max(min(self.global_period, self.steps - self.summed_steps), 1)

    @property
    def pod_averagings(self) -> int:
        """Return how often the replicas of a pod average by themselves in a block."""
        return (self.block - 1) // self.period

    def sums_gradients(self, done: int) -> bool:
        """Whether the step after `done` ones is one of a single model."""
        return done < self.summed_steps

    def takes_average(self, done: int) -> bool:
        """Whether the averaging after `done` steps takes the average as it is, whatever the mode."""
        return done <= self.plain_steps

    def averaging(self, done: int) -> Averaging:
        """Return which replicas average after `done` steps, the last of which was taken alone. The end of the run ends
        a block."""
        alone = done - self.summed_steps
        if done == self.steps or alone % self.global_period == 0:
            return Averaging.ALL
        return Averaging.POD if alone % self.period == 0 else Averaging.NONE

    def together(self, done: int) -> bool:
        """Whether all replicas hold one model after `done` steps."""
        return done <= self.summed_steps or self.averaging(done) is Averaging.ALL
