"""Worker 0's part of a gang: takes the other agents' connections, and passes on what they and its leader say."""

import asyncio
import socket
from collections.abc import Callable, Container, Coroutine, Iterator
from datetime import UTC, datetime, timedelta

from disttrain_agent.gang.channel import HANDSHAKE_SECONDS, MAX_LINE_BYTES, Channel, end, lead
from disttrain_agent.gang.leader import Leader, Left
from disttrain_agent.gang.messages import Kind, Message, PodFailure
from disttrain_agent.resolve import own_address
from disttrain_agent.restart import Kept
from disttrain_api.handshake import Refused
from disttrain_api.report import RestartsInPlace
from disttrain_api.times import timestamp
from disttrain_api.unproven import Waiting, source_of

_BACKLOG = 256


class LeadingAgent:
    """The gang for the supervisor of worker 0's ranks.

    changed: called when something has come in. listener: None where there are no other pods. master_ports: one for each
    generation but the first; None: all meet on the port of their pods. announce: says to the workers that are not
    connected where this pod is; None: nobody has to.
    """

    def __init__(
        self,
        leader: Leader,
        changed: Callable[[], None],
        log: Callable[[str], None],
        key: bytes = b"",
        workers: int = 1,
        listener: socket.socket | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        master_ports: Iterator[int] | None = None,
        announce: Callable[[Container[int]], Coroutine[None, None, None]] | None = None,
    ) -> None:
        self._leader, self._changed, self._log = leader, changed, log
        self._key, self._workers, self._clock, self._master_ports = key, workers, clock, master_ports
        self.master_port: int | None = None
        self._loop = asyncio.get_running_loop()
        self._channels: dict[int, Channel] = {}
        self._unproven: Waiting[asyncio.WriteTransport] = Waiting()
        self._listening: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._failed = -1, ""
        """The generation of the last failure, and when its first rank failed."""
        self._awaited = leader.awaited
        self.refused = 0
        """Connections that were no agent's of this attempt."""
        self.restarts: RestartsInPlace | None = None
        self.master_address: str | None = None
        """Where the others have found a pod that is another one of worker 0: its name may not lead there yet."""
        if listener is not None:
            listener.setblocking(False)
            self._listening = self._loop.create_task(self._listen(listener))
        self._announcing = None if announce is None else self._loop.create_task(announce(self._channels))

    @property
    def generation(self) -> int:
        return self._leader.generation

    @property
    def must_stop(self) -> bool:
        return self._leader.must_stop

    @property
    def kill(self) -> Message | None:
        return self._leader.kill

    @property
    def left(self) -> Left | None:
        return self._leader.left

    @property
    def due(self) -> float | None:
        return self._leader.due

    @property
    def awaited(self) -> frozenset[int]:
        return self._leader.awaited

    def hear_leader(self, address: str, replacement: int) -> bool:
        """Worker 0's agent looks for no other."""
        return False

    def tick(self) -> None:
        """Do what is due."""
        self._leader.tick(self._loop.time())
        self._pass_on()

    def failed(self, ago: float) -> None:
        """A rank of this pod has failed, so many seconds ago."""
        self._leader.failed(0, self.generation, self._loop.time())
        self._pass_on(ago)

    def hangs(self, generation: int, rank: int | None, kept: Kept) -> bool | str:
        """Have a rank of any pod killed (None: all), since the gang does no step; whether it is, or why not."""
        found = self._leader.hangs(generation, rank, kept, self._loop.time())
        self._pass_on()
        return found

    def ended(self, failure: PodFailure, ago: float) -> None:
        """Nothing is left of this pod's ranks and of what they have started."""
        self._leader.ended(0, self.generation, failure, self._loop.time())
        self._pass_on(ago)

    def depart(self, why: str) -> None:
        """This pod ends, and another one may lead in its place: for it the others wait without a connection."""
        self._leader.depart(why)
        self.close()

    def leave(self, why: str) -> None:
        """No rank starts again."""
        self._leader.leave(why)
        self._pass_on()

    def close(self) -> None:
        """End all connections."""
        for task in (self._listening, self._announcing):
            if task is not None:
                task.cancel()
        if self._server is not None:
            self._server.close()
        for channel in self._channels.values():
            channel.close()

    def _pass_on(self, ago: float = 0.0) -> None:
        """Send the leader's orders to all pods, and note what has come of them. ago: seconds since a rank failed."""
        orders, self._leader.orders = self._leader.orders, []
        for order in orders:
            if order.kind is Kind.START and self._master_ports is not None:
                self.master_port = next(self._master_ports) or None
                order = order.model_copy(update={"master_port": self.master_port or 0})
            for channel in list(self._channels.values()):
                channel.send(order)
        if self._leader.due is not None and self._failed[0] != self.generation:
            self._failed = self.generation, timestamp(self._clock() - timedelta(seconds=ago))
        restart = self._leader.restart
        if restart is not None and (self.restarts is None or self.restarts.count < restart.count):
            self.restarts = RestartsInPlace(
                count=restart.count, time=self._failed[1], pause_seconds=restart.pause_seconds, failure=restart.cause
            )
        awaited, self._awaited = self._awaited, self._leader.awaited
        for worker in sorted(self._awaited - awaited):
            self._log(f"gang: the pod of worker {worker} is lost; waiting for another one in its place")
        if orders:
            self._changed()

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_LINE_BYTES, backlog=_BACKLOG)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one connection, until it ends."""
        worker, channel, alive = -1, None, None
        address, transport = str((writer.get_extra_info("peername") or ("::",))[0]), writer.transport
        try:
            pushed_out = self._unproven.add(transport, source_of(address), self._loop.time())
            if pushed_out is not None:
                pushed_out.abort()
            worker, channel = await asyncio.wait_for(lead(reader, writer, self._key, self._workers), HANDSHAKE_SECONDS)
            self._unproven.remove(transport)
            joins = await asyncio.wait_for(channel.receive(), HANDSHAKE_SECONDS)
            taken, answer = self._leader.admit(worker, joins, self._loop.time())
            if answer is not None:
                channel.send(answer)
            if not taken:
                raise Refused("it cannot take part now")
            if self._leader.is_replacement:
                self.master_address = own_address(writer)
            former, self._channels[worker] = self._channels.get(worker), channel
            if former is not None:
                former.close()
            if len(self._channels) == self._workers - 1:
                self._log(f"restarts in place: the agents of all {self._workers} workers are connected")
            alive = self._loop.create_task(channel.stay_alive())
            self._pass_on()
            self._changed()
            while True:
                message = await channel.receive()
                if self._channels.get(worker) is not channel:
                    raise Refused("another connection has taken its place")
                self._leader.receive(worker, message, self._loop.time())
                self._pass_on(message.ago)
                self._changed()
        except (OSError, Refused) as error:
            if channel is None:
                self._refuse(address, str(error) or "it has not proved in time that it knows the token of this attempt")
        finally:
            self._unproven.remove(transport)
            if alive is not None:
                alive.cancel()
            if channel is not None and self._channels.get(worker) is channel:
                del self._channels[worker]
                self._leader.lost(worker)
                self._pass_on()
            await end(writer)

    def _refuse(self, address: str, why: str) -> None:
        self.refused += 1
        # A flood of them is a few lines.
        if self.refused & (self.refused - 1) == 0:
            count = "" if self.refused == 1 else f" ({self.refused} so far)"
            self._log(f"gang: refused a connection from {address}: {why}{count}")
