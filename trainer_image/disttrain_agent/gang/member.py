"""What the agent of another pod than worker 0 knows of its gang. Pure."""

from disttrain_agent.gang.leader import Left
from disttrain_agent.gang.messages import Kind, Message, PodFailure, leaves


class Member:
    """One pod's part. Messages for the leader are in `orders`.

    replacement: which replacement of a lost pod it is; 0: none. One starts its ranks first when it is ordered to.
    Whatever keeps the leader from deciding on a failure leaves the gang: the pod then ends as without InPlace.
    """

    def __init__(self, replacement: int = 0) -> None:
        self._replacement, self._waits = replacement, replacement > 0
        self.generation = 0
        self.master_port = 0
        self.left: Left | None = None
        self.orders: list[Message] = []
        self._connected = False
        self._begin()
        self._failed = self._ended = self._waits

    def _begin(self) -> None:
        self.must_stop = False
        self._failed = self._ended = False

    def connected(self) -> None:
        """There is a new connection to the leader."""
        self._connected = True
        self.orders.append(Message(kind=Kind.JOINS, generation=self.generation, replacement=self._replacement))

    def lost(self) -> None:
        """The connection has ended."""
        self._connected = False
        if self._failed:
            self._leave(Left("worker 0's agent is not connected"))

    def receive(self, message: Message) -> None:
        """The leader says something. What is of another generation is dropped; a replacement is of none yet."""
        if self.left is not None:
            return
        if message.kind is Kind.START and self._ended and (self._waits or message.generation == self.generation + 1):
            self.generation, self.master_port, self._waits = message.generation, message.master_port, False
            self._begin()
        elif self._waits or message.generation == self.generation:
            if message.kind is Kind.STOP:
                self.must_stop = True
            elif message.kind is Kind.LEAVES:
                self._leave(Left(message.why, message.repeated))

    def failed(self, ago: float = 0.0) -> None:
        """A rank of this pod has failed, so many seconds ago."""
        if self.left is not None or self._failed:
            return
        self._failed = True
        if self._connected:
            self.orders.append(Message(kind=Kind.FAILED, generation=self.generation, ago=ago))
        else:
            self._leave(Left("worker 0's agent is not connected"))

    def ended(self, failure: PodFailure, ago: float = 0.0) -> None:
        """Nothing is left of this pod's ranks and of what they have started."""
        self.failed(ago)
        if self.left is None and not self._ended:
            self._ended = True
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
