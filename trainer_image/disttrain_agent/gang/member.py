"""What the agent of another pod than worker 0 knows of its gang. Pure."""

import math

from disttrain_agent.gang.leader import Left
from disttrain_agent.gang.messages import History, Kind, Message, PodFailure, leaves


class Member:
    """One pod's part. Messages for the leader are in `orders`.

    replacement: which replacement of a lost pod it is; 0: none. One starts its ranks first when it is ordered to.
    longest: seconds for which it waits without a connection once its ranks have failed, since worker 0's pod may be
    lost and another one take its place. unmoved: the same, as long as nothing says that it is lost.
    Whatever keeps the leader from deciding on a failure leaves the gang: the pod then ends as without InPlace.
    """

    def __init__(self, replacement: int = 0, longest: float = 0.0, unmoved: float = math.inf) -> None:
        self._replacement, self._waits = replacement, replacement > 0
        self._longest, self._unmoved = longest, min(unmoved, longest)
        self.leader_moved = True
        """Whether worker 0's name leads to another address than that of the last connection, or to none."""
        self.generation = 0
        self.leader = 0
        """Which replacement of worker 0's pod has ordered the last start; 0: none."""
        self._history = History()
        self.master_port = 0
        self.left: Left | None = None
        self.orders: list[Message] = []
        self._connected = self._was_connected = False
        self._begin()
        self._failed = self._ended = self._waits

    def _begin(self) -> None:
        self.must_stop = False
        self.kill: Message | None = None
        """The order to kill ranks, since the gang hangs."""
        self._failed = self._ended = False
        self._failure: PodFailure | None = None
        self._alone_since: float | None = None

    def connected(self) -> None:
        """There is a new connection to a leader, which may know nothing of this pod."""
        self._connected = self._was_connected = True
        self._alone_since = None
        joins = Message(
            kind=Kind.JOINS, generation=self.generation, replacement=self._replacement, leader=self.leader,
            history=self._history,
        )  # fmt: skip
        self.orders.append(joins)
        if self._failed and not self._waits:
            self.orders.append(Message(kind=Kind.FAILED, generation=self.generation))
        if self._failure is not None:
            self.orders.append(Message(kind=Kind.ENDED, generation=self.generation, failure=self._failure))

    def lost(self, now: float = 0.0) -> None:
        """The connection has ended."""
        self._connected = False
        if self._failed:
            self._is_alone(now)

    def _is_alone(self, now: float) -> None:
        if not self._was_connected:
            self._leave(Left("worker 0's agent is not connected"))
        elif self._alone_since is None:
            self._alone_since = now

    @property
    def is_alone(self) -> bool:
        """Whether its ranks have failed, and it waits for a connection."""
        return self._alone_since is not None and self.left is None

    @property
    def due(self) -> float | None:
        """When to call `tick`; None: not before something happens."""
        if self._alone_since is None or self.left is not None:
            return None
        return self._alone_since + (self._longest if self.leader_moved else self._unmoved)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.due is not None and now >= self.due:
            self._leave(Left("worker 0's agent is not connected, and no other one in its place"))

    def receive(self, message: Message) -> None:
        """The leader says something. What is of a former generation is dropped; a replacement is of none yet."""
        if self.left is not None:
            return
        if message.kind is Kind.START:
            if self._ended and self._is_next(message):
                self.generation, self.master_port, self._waits = message.generation, message.master_port, False
                self.leader, self._history = message.replacement, message.history or History()
                self._begin()
        elif self._waits or message.generation >= self.generation:
            if message.kind is Kind.STOP:
                self.must_stop = True
            elif message.kind is Kind.KILL:
                self.kill = message
            elif message.kind is Kind.LEAVES:
                self._leave(Left(message.why, message.repeated))

    def _is_next(self, start: Message) -> bool:
        """Another leader may have learned of a newer generation, which never came to this pod."""
        jumps = start.replacement > self.leader and start.generation > self.generation
        return self._waits or jumps or start.generation == self.generation + 1

    def failed(self, ago: float = 0.0, now: float = 0.0) -> None:
        """A rank of this pod has failed, so many seconds ago."""
        if self.left is not None or self._failed:
            return
        self._failed = True
        if self._connected:
            self.orders.append(Message(kind=Kind.FAILED, generation=self.generation, ago=ago))
        else:
            self._is_alone(now)

    def ended(self, failure: PodFailure, ago: float = 0.0, now: float = 0.0) -> None:
        """Nothing is left of this pod's ranks and of what they have started."""
        self.failed(ago, now)
        if self.left is None and not self._ended:
            self._ended, self._failure = True, failure
            self.orders.append(Message(kind=Kind.ENDED, generation=self.generation, failure=failure, ago=ago))

    def depart(self, why: str) -> None:
        """This pod ends, and another one may take its place."""
        if self.left is None:
            self.orders.append(Message(kind=Kind.DEPARTS, generation=self.generation))
            self._leave(Left(why))

    def leave(self, why: str) -> None:
        """No rank starts again."""
        if self.left is None:
            self.orders.append(leaves(self.generation, why))
            self._leave(Left(why))

    def _leave(self, left: Left) -> None:
        self.left = self.left or left
