"""The generations of a gang, as worker 0's agent decides on them. Pure: times are arguments.

    all train -> one fails -> (window) stop -> all have ended -> restart.after -> (pause) start of the next generation

Whatever does not fit, or does not come in time, ends this: the gang is left, and no rank starts again in this attempt.
A generation begins only when every pod has said of the former one that nothing of it is left.
"""

from dataclasses import dataclass

from disttrain_agent.gang.messages import Kind, Message, PodFailure, leaves
from disttrain_agent.restart import Failure, Leave, Limits, Record, after
from disttrain_agent.verdict import distance
from disttrain_api.names import PERMANENT
from disttrain_api.report import FailureSignature, RankFailure

_SIGNALED = 6
"""Distance of a rank that an agent has ended, further than that of any which ended by itself."""


@dataclass(frozen=True)
class Left:
    """Why no rank starts again in this attempt."""

    why: str
    repeated: FailureSignature | None = None
    """The signature of a failure that came again without progress in between."""


@dataclass(frozen=True)
class Restart:
    """A restart that is decided."""

    count: int
    pause_seconds: int
    cause: RankFailure


class Leader:
    """Decides for `workers` pods, of which its own is number 0. Messages for all of them are in `orders`.

    window: seconds from the first failure to the order to stop, in which other ranks may fail by themselves.
    patience: seconds from the first failure in which all pods must have ended their ranks.
    """

    def __init__(self, workers: int, limits: Limits, window: float, patience: float) -> None:
        self._workers, self._limits, self._window, self._patience = workers, limits, window, patience
        self.generation = 0
        self.left: Left | None = None
        self.restart: Restart | None = None
        """The last one."""
        self.orders: list[Message] = []
        self._record = Record()
        self._present = {0}
        self._begin()

    def _begin(self) -> None:
        self.must_stop = False
        self._failed_at: float | None = None
        self._ended: dict[int, PodFailure] = {}
        self._start_at: float | None = None

    def joins(self, worker: int, generation: int) -> bool:
        """Return whether a pod takes part, whose agent has connected. None comes amid a restart."""
        takes_part = self.left is None and self._failed_at is None and generation == self.generation
        if takes_part:
            self._present.add(worker)
        return takes_part

    def lost(self, worker: int) -> None:
        """The connection of a pod's agent has ended. It may come again while all ranks train."""
        self._present.discard(worker)
        if self._failed_at is not None:
            self.leave(f"the agent of worker {worker} is not connected")

    def failed(self, worker: int, generation: int, now: float) -> None:
        """A rank of a pod has failed."""
        if not self._hears(worker, generation) or self._failed_at is not None:
            return
        self._failed_at = now
        absent = sorted(set(range(self._workers)) - self._present)
        if absent:
            self.leave(f"the agent of worker {absent[0]} is not connected")

    def ended(self, worker: int, generation: int, failure: PodFailure, now: float) -> None:
        """Nothing is left of a pod's ranks and of what they have started."""
        self.failed(worker, generation, now)
        if not self._hears(worker, generation) or worker in self._ended:
            return
        self._ended[worker] = failure
        if len(self._ended) == self._workers:
            self._decide(now)

    def leave(self, why: str, repeated: FailureSignature | None = None) -> None:
        """No rank starts again."""
        if self.left is None:
            self.left = Left(why, repeated)
            self.orders.append(leaves(self.generation, why, repeated))

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.left is not None or self._failed_at is None:
            return
        if self._start_at is not None:
            if now >= self._start_at:
                self.generation += 1
                self._begin()
                self.orders.append(Message(kind=Kind.START, generation=self.generation))
        elif now >= self._failed_at + self._patience:
            late = min(set(range(self._workers)) - set(self._ended))
            self.leave(f"the ranks of worker {late} have not ended in time")
        elif now >= self._failed_at + self._window and not self.must_stop:
            self.must_stop = True
            self.orders.append(Message(kind=Kind.STOP, generation=self.generation))

    @property
    def due(self) -> float | None:
        """When something is due; None: not before something happens."""
        if self.left is not None or self._failed_at is None:
            return None
        if self._start_at is not None:
            return self._start_at
        return self._failed_at + (self._patience if self.must_stop else self._window)

    def _hears(self, worker: int, generation: int) -> bool:
        return self.left is None and worker in self._present and generation == self.generation

    def _decide(self, now: float) -> None:
        first = min(self._ended.values(), key=_distance)
        checkpoint = max((end.checkpoint for end in self._ended.values() if end.checkpoint is not None), default=None)
        follows = after(Failure(first.cause, checkpoint, first.out_of_memory), self._record, self._limits)
        if isinstance(follows, Leave):
            self.leave(follows.why, first.cause.signature if follows.repeated else None)
            return
        self._record = follows.record
        self.restart = Restart(follows.record.restarts, follows.pause_seconds, first.cause)
        self._start_at = now + follows.pause_seconds


def _distance(end: PodFailure) -> int:
    """Smaller is nearer to the first cause; of equals the first counts."""
    code = end.cause.exit_code
    if end.signaled and code not in PERMANENT:
        return _SIGNALED
    return distance(code, end.cause.signal, signaled=end.signaled)
