"""The generations of a gang, as worker 0's agent decides on them. Pure: times are arguments.

    all train -> one fails -> (window) stop -> all have ended -> restart.after -> (pause) start of the next generation

Whatever does not fit, or does not come in time, ends this: the gang is left, and no rank starts again in this attempt.
A generation begins only when every pod has said of the former one that nothing of it is left, or has a replacement: the
operator makes one under the name of the lost pod, which is free only once that pod is gone.

A leader that is a replacement itself knows nothing. It learns from the others of what generation their ranks are, and
what they were told of former restarts, and begins the next generation after the newest of these.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from signal import SIGKILL

from disttrain_agent.gang.messages import History, Kind, Message, PodFailure, leaves
from disttrain_agent.restart import Failure, Kept, Leave, Limits, Record, after, after_loss, hopeless
from disttrain_agent.restart import Restart as Follows
from disttrain_agent.verdict import distance
from disttrain_api.names import PERMANENT, ExitCode, Reason
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
    longest: seconds from the first failure in which lost pods must have replacements.
    replacement: which replacement of a lost pod its own pod is, from `now` on; 0: none.
    """

    def __init__(
        self, workers: int, limits: Limits, window: float, patience: float, longest: float, ranks_per_pod: int = 1,
        replacement: int = 0, now: float = 0.0,
    ) -> None:  # fmt: skip
        self._workers, self._limits, self._ranks_per_pod = workers, limits, ranks_per_pod
        self._window, self._patience, self._longest = window, patience, longest
        self._replacement, self._learns = replacement, replacement > 0
        self.is_replacement = replacement > 0
        self.generation = 0
        """The generation of its own pod's ranks."""
        self._newest = 0
        """The newest generation that it knows of."""
        self.left: Left | None = None
        self.departed = False
        """Whether it has left alone: another pod may lead the others in its place."""
        self.restart: Restart | None = None
        """The last one."""
        self.orders: list[Message] = []
        self._record = self._next_record = Record()
        self._present = {0}
        self._replacements: dict[int, int] = {0: replacement}
        """Which replacement of its pod each worker has had last, of those that have ever joined."""
        self._generations: dict[int, int] = {0: 0}
        """The generation of the ranks of these workers."""
        self._begin()
        if self._learns:
            self._fails(now)
            self._ended[0] = None

    def _begin(self) -> None:
        self.must_stop = False
        self.kill: Message | None = None
        """The order to kill ranks, since the gang hangs."""
        self._failed_at: float | None = None
        self._end_by = 0.0
        """With a failure: when all pods that are connected must have ended their ranks."""
        self._ended: dict[int, PodFailure | None] = {}
        """How the ranks of each pod have ended. None: it is a replacement, which has not started any."""
        self._start_at: float | None = None

    def _fails(self, now: float) -> None:
        if self._failed_at is None:
            self._failed_at, self._end_by = now, now + self._patience

    def admit(self, worker: int, joins: Message, now: float) -> tuple[bool, Message | None]:
        """Return whether a pod takes part whose agent has connected and says this first, and what it is to hear."""
        if joins.leader > self._replacement:
            # This pod was lost to the others, and a generation of theirs may have the number of its own.
            self.depart("another pod of worker 0 has taken its place")
        if joins.kind is Kind.JOINS and self.joins(worker, joins.generation, now, joins.replacement, joins.history):
            return True, self.standing
        why = self._why_not(worker, joins)
        return False, None if why is None else leaves(joins.generation, why)

    def _why_not(self, worker: int, joins: Message) -> str | None:
        """Why a pod that takes no part has to end; None: it may come again."""
        if self.left is not None:
            return None if self.departed else self.left.why
        if self.is_former(worker, joins.replacement):
            return "another pod has taken its place"
        return "the others have started without it" if self.is_behind(joins.generation) else None

    def receive(self, worker: int, message: Message, now: float) -> None:
        """A pod that takes part says something."""
        if message.kind is Kind.FAILED:
            self.failed(worker, message.generation, now)
        elif message.kind is Kind.ENDED and message.failure is not None:
            self.ended(worker, message.generation, message.failure, now)
        elif message.kind is Kind.DEPARTS:
            self.departs(worker)
        elif message.kind is Kind.LEAVES:
            self.leaves(worker, message.generation, message.why)

    def joins(
        self, worker: int, generation: int, now: float, replacement: int = 0, history: History | None = None
    ) -> bool:
        """Return whether a pod takes part, whose agent has connected. While all train, a replacement that has started
        no ranks yet is the first sign that its former pod is lost."""
        if self.left is not None or not self._may_join(worker, generation, replacement):
            return False
        self._present.add(worker)
        if (replacement, generation) != (self._replacements.get(worker), self._generations.get(worker)):
            self._ended.pop(worker, None)
        self._replacements[worker], self._generations[worker] = replacement, generation
        has_started = not replacement or generation > 0
        if has_started and self._learns and generation >= self._newest:
            self._learn(generation, history or History())
        if not has_started:
            self._fails(now)
            self._ended[worker] = None
        if self._failed_at is not None:
            # It has yet to be ordered to stop.
            self._end_by = min(now + self._patience, self._failed_at + self._longest)
        self._decide(now)
        return True

    def _may_join(self, worker: int, generation: int, replacement: int) -> bool:
        former = self._replacements.get(worker, 0)
        if replacement < former:
            return False
        if worker in self._replacements and replacement == former:
            # Nothing has started without it since it joined, unless a former leader was there still.
            return self._learns or generation == self._generations[worker]
        return self._learns or generation == (0 if replacement else self.generation)

    def _learn(self, generation: int, history: History) -> None:
        self._newest, self._start_at = generation, None
        self._record = Record(
            generation, history.since_checkpoint, history.checkpoint, history.began, history.signature,
            history.out_of_memory,
        )  # fmt: skip

    def is_behind(self, generation: int) -> bool:
        """Return whether the ranks of a generation have had a start since, without the pod that is still of it."""
        return generation < self.generation

    def is_former(self, worker: int, replacement: int) -> bool:
        """Return whether another pod of the worker has taken the place of this one."""
        return replacement < self._replacements.get(worker, 0)

    def lost(self, worker: int) -> None:
        """The connection of a pod's agent has ended. It may come again while all ranks train."""
        self._present.discard(worker)
        self._ended.pop(worker, None)

    def failed(self, worker: int, generation: int, now: float) -> None:
        """A rank of a pod has failed."""
        if not self._hears(worker, generation) or self._failed_at is not None:
            return
        self._fails(now)
        never = sorted(set(range(self._workers)) - set(self._replacements))
        if never:
            self.leave(f"the agent of worker {never[0]} is not connected")

    def hangs(self, generation: int, rank: int | None, kept: Kept, now: float) -> bool | str:
        """Have a rank killed (None: all) that does no step, so that all start again; return whether it is, or why it
        may not be. Nothing follows if its generation has ended, or is about to.

        kept: what this pod's ranks have reported.
        """
        if self.left is not None:
            return self.left.why
        if generation != self.generation or self._failed_at is not None:
            return False
        absent = sorted(set(range(self._workers)) - self._present)
        if absent:
            return f"the agent of worker {absent[0]} is not connected"
        killed = RankFailure(rank=rank or 0, exit_code=128 + SIGKILL, signal=SIGKILL)
        follows = after(Failure(killed, kept), self._record, self._limits)
        if isinstance(follows, Leave):
            return follows.why
        self.kill = Message(kind=Kind.KILL, generation=generation, rank=rank)
        self.orders.append(self.kill)
        self._fails(now)
        return True

    def ended(self, worker: int, generation: int, failure: PodFailure, now: float) -> None:
        """Nothing is left of a pod's ranks and of what they have started."""
        self.failed(worker, generation, now)
        if not self._hears(worker, generation) or worker in self._ended:
            return
        self._ended[worker] = failure
        self._decide(now)

    def departs(self, worker: int) -> None:
        """A pod is to end, with its ranks: they may have the others save a checkpoint first."""
        self.lost(worker)

    def leaves(self, worker: int, generation: int, why: str) -> None:
        """A pod says that no rank starts again."""
        if self._hears(worker, generation):
            self.leave(f"worker {worker}: {why}")

    def depart(self, why: str) -> None:
        """Its own pod is to end. The others are told nothing: another pod may lead them."""
        if self.left is None:
            self.left, self.departed = Left(why), True

    def leave(self, why: str, repeated: FailureSignature | None = None) -> None:
        """No rank starts again."""
        if self.left is None:
            self.left = Left(why, repeated)
            self.orders.append(leaves(self._newest, why, repeated))

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.left is not None or self._failed_at is None:
            return
        if self._starts_at is not None:
            if now >= self._starts_at:
                self._start()
        elif now >= self._end_by and self._late:
            self.leave(f"the ranks of worker {min(self._late)} have not ended in time")
        elif now >= self._failed_at + self._longest:
            self.leave(f"no other pod of worker {min(self.awaited)} has joined in time")
        elif now >= self._failed_at + self._window and not self.must_stop:
            self.must_stop = True
            self.orders.append(self._stop)

    def _start(self) -> None:
        self.generation = self._newest = self._newest + 1
        self._generations = dict.fromkeys(self._generations, self.generation)
        self._record, self._learns = self._next_record, False
        history = History(
            since_checkpoint=self._record.since_checkpoint,
            checkpoint=self._record.checkpoint,
            began=self._record.began,
            signature=self._record.signature,
            out_of_memory=self._record.out_of_memory,
        )
        self._begin()
        self.orders.append(
            Message(kind=Kind.START, generation=self.generation, replacement=self._replacement, history=history)
        )

    @property
    def _stop(self) -> Message:
        return Message(kind=Kind.STOP, generation=self._newest)

    @property
    def standing(self) -> Message | None:
        """The order that also a pod has to hear which joins now."""
        return self._stop if self.must_stop and self.left is None else None

    @property
    def due(self) -> float | None:
        """When something is due; None: not before something happens."""
        if self.left is not None or self._failed_at is None:
            return None
        if self._starts_at is not None:
            return self._starts_at
        if not self.must_stop:
            return self._failed_at + self._window
        return self._end_by if self._late else self._failed_at + self._longest

    @property
    def awaited(self) -> frozenset[int]:
        """Workers whose pods are lost amid a restart, which waits for other pods in their place."""
        if self.left is not None or self._failed_at is None:
            return frozenset()
        return frozenset(range(self._workers)) - self._present

    @property
    def _late(self) -> set[int]:
        """Pods that have yet to end their ranks, and can say so."""
        return self._present - set(self._ended)

    @property
    def _starts_at(self) -> float | None:
        """When the next generation starts; None: not before something happens."""
        return self._start_at if len(self._ended) == self._workers else None

    def _hears(self, worker: int, generation: int) -> bool:
        return self.left is None and worker in self._present and generation == self._generations[worker]

    def _decide(self, now: float) -> None:
        """Decide on what follows, once, when all have ended."""
        if len(self._ended) < self._workers or self._start_at is not None:
            return
        ends = [end for end in self._ended.values() if end is not None]
        if not ends:
            self.leave("all pods are replacements: none knows the generation of the former ones")
            return
        kept = Kept(_newest(end.checkpoint for end in ends), _newest(end.began for end in ends))
        first = min(ends, key=_distance)
        cause, follows = first.cause, self._follows(first, kept)
        if isinstance(follows, Leave):
            self.leave(follows.why, cause.signature if follows.repeated else None)
            return
        replaced = [worker for worker, end in self._ended.items() if end is None]
        if replaced:
            cause = RankFailure(rank=min(replaced) * self._ranks_per_pod, reason=Reason.POD_LOST)
        self._next_record = follows.record
        self.restart = Restart(follows.record.restarts, follows.pause_seconds, cause)
        self._start_at = now + follows.pause_seconds

    def _follows(self, first: PodFailure, kept: Kept) -> Follows | Leave:
        if None not in self._ended.values():
            return after(Failure(first.cause, kept), self._record, self._limits)
        # Ranks that the lost pod's have asked to stop with them have done what they should.
        obeyed = first.signaled or first.cause.exit_code == ExitCode.STOPPED
        why = None if obeyed else hopeless(first.cause)
        return after_loss(kept, self._record) if why is None else Leave(why)


def _newest(steps: Iterable[int | None]) -> int | None:
    return max((step for step in steps if step is not None), default=None)


def _distance(end: PodFailure) -> int:
    """Smaller is nearer to the first cause; of equals the first counts."""
    code = end.cause.exit_code
    if end.signaled and code not in PERMANENT:
        return _SIGNALED
    return distance(code, end.cause.signal, signaled=end.signaled)
