"""Another worker's part of a gang: keeps a connection to worker 0's agent."""

import asyncio
import math
from collections.abc import Callable

from disttrain_agent.gang.channel import HANDSHAKE_SECONDS, MAX_LINE_BYTES, Channel, end, follow
from disttrain_agent.gang.leader import Left
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import Message, PodFailure
from disttrain_agent.resolve import addresses
from disttrain_agent.restart import Kept
from disttrain_api.handshake import Refused
from disttrain_api.report import RestartsInPlace

_AGAIN_SECONDS = 1.0
_CONNECT_SECONDS = 3.0
"""For a connection. The name is looked up again after it: worker 0 may have another pod by then."""
_NAMES_TURN = 4
"""One of so many tries looks the name up although the agent has heard of an address, which may be a lie."""
_HURRY_SECONDS = 10.0
"""Between two addresses at least for which a try is given up: who sends them may mean harm."""


class FollowingAgent:
    """The gang for the supervisor of this worker's ranks. changed: called when something has come in."""

    restarts: RestartsInPlace | None = None
    """Worker 0's agent reports them."""

    def __init__(
        self, changed: Callable[[], None], log: Callable[[str], None], key: bytes, worker: int, workers: int, host: str,
        port: int, replacement: int = 0, longest: float = 0.0, unmoved: float = 0.0, heard: str | None = None,
    ) -> None:  # fmt: skip
        self._member, self._changed, self._log = Member(replacement, longest, unmoved), changed, log
        self._key, self._worker, self._workers, self._host, self._port = key, worker, workers, host, port
        self._channel: Channel | None = None
        self._address = host
        """Where worker 0's agent was found last."""
        self._alone = False
        self._tries = self._tries_heard = 0
        self._heard_of: str | None = None
        """Where worker 0's agent is to be, until its name leads there."""
        self._heard_number = 0
        """Which replacement is there, by the newest that was heard of."""
        self._heard_first = heard
        """The same before its name has an address, until the first connection."""
        self._loop = asyncio.get_running_loop()
        self._hurried_at = -math.inf
        self._task = self._loop.create_task(self._stay_connected())

    @property
    def generation(self) -> int:
        return self._member.generation

    @property
    def master_port(self) -> int | None:
        return self._member.master_port or None

    @property
    def master_address(self) -> str | None:
        # For a while its name may still lead to the former pod.
        return self._address if self._member.leader else None

    @property
    def must_stop(self) -> bool:
        return self._member.must_stop

    @property
    def kill(self) -> Message | None:
        return self._member.kill

    @property
    def left(self) -> Left | None:
        return self._member.left

    @property
    def due(self) -> float | None:
        return self._member.due

    @property
    def awaited(self) -> frozenset[int]:
        """Worker 0, if it is awaited: its agent knows about the others."""
        return frozenset({0} if self._member.is_alone else ())

    def hear_leader(self, address: str, replacement: int) -> bool:
        """Somebody says where worker 0's pod is: it is tried at once where there is no connection. Who is there has to
        prove the key of the attempt, so a lie costs a try."""
        if self._member.left is not None or replacement <= self._member.leader or replacement < self._heard_number:
            return False
        self._heard_number = replacement
        self._heard_of, now = address, self._loop.time()
        if self._channel is None and now >= self._hurried_at + _HURRY_SECONDS:
            self._log(f"gang: another pod of worker 0 is at {address}")
            self._hurried_at, self._tries_heard = now, 0
            # A name server may take its time for an answer, and a dead node for none.
            self._task.cancel()
            self._task = self._loop.create_task(self._stay_connected())
        return True

    def tick(self) -> None:
        """Do what is due."""
        self._member.tick(self._loop.time())

    def failed(self, ago: float) -> None:
        """A rank of this pod has failed, so many seconds ago."""
        self._member.failed(ago, self._loop.time())
        self._note_alone()
        self._pass_on()

    def hangs(self, generation: int, rank: int | None, kept: Kept) -> bool | str:
        """Return why it has no rank killed."""
        return "worker 0's agent leads"

    def ended(self, failure: PodFailure, ago: float) -> None:
        """Nothing is left of this pod's ranks and of what they have started."""
        self._member.ended(failure, ago, self._loop.time())
        self._note_alone()
        self._pass_on()

    def depart(self, why: str) -> None:
        """This pod ends, and another one may take its place."""
        self._member.depart(why)
        self._pass_on()

    def leave(self, why: str) -> None:
        """No rank starts again."""
        self._member.leave(why)
        self._pass_on()

    def close(self) -> None:
        """End the connection."""
        self._task.cancel()
        if self._channel is not None:
            self._channel.close()

    def _pass_on(self) -> None:
        orders, self._member.orders = self._member.orders, []
        if self._channel is not None:
            for order in orders:
                self._channel.send(order)

    def _note_alone(self) -> None:
        if self._member.is_alone and not self._alone:
            self._log("gang: worker 0's agent is lost; waiting for another one in its place")
        self._alone = self._member.is_alone

    async def _stay_connected(self) -> None:
        refused = ""
        while self._member.left is None:
            try:
                await self._connect_and_hear()
            except (OSError, Refused) as error:
                if str(error) != refused and isinstance(error, Refused):
                    refused = str(error)
                    self._log(f"gang: {self._host}:{self._port}: {error}")
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _where(self) -> str:
        """Return the address to try next. Raises OSError where none is known."""
        if (heard := self._heard_of or self._heard_first) is not None:
            self._tries_heard += 1
            if self._tries_heard % _NAMES_TURN:
                return heard
        self._member.leader_moved = True
        found = await addresses(self._host, self._port)
        self._member.leader_moved = self._address not in found
        if self._heard_of in found:
            self._heard_of = None
        # One that refuses, such as ::1 where only 127.0.0.1 listens, must not keep the others from being tried.
        self._tries += 1
        return found[self._tries % len(found)]

    async def _connect_and_hear(self) -> None:
        host = await self._where()
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, self._port, limit=MAX_LINE_BYTES), _CONNECT_SECONDS
        )
        alive = None
        try:
            channel = await asyncio.wait_for(
                follow(reader, writer, self._key, self._worker, self._workers), HANDSHAKE_SECONDS
            )
            self._channel, self._address, self._heard_first = channel, host, None
            self._member.connected()
            self._alone = False
            self._pass_on()
            alive = self._loop.create_task(channel.stay_alive())
            while True:
                self._member.receive(await channel.receive())
                self._changed()
        finally:
            if alive is not None:
                alive.cancel()
            if self._channel is not None:
                self._channel = None
                self._member.lost(self._loop.time())
                self._note_alone()
                self._changed()
            await end(writer)
