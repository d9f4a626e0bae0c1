"""The loop around a server: frames in, frames out. All decisions are server.py's."""

from __future__ import annotations

import ipaddress
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from disttrain_trainer.parameter_server.protocol.sockets import new_context, server_socket
from disttrain_trainer.parameter_server.protocol.wire import Answers, Malformed, Message, decode, encode, key_with
from disttrain_trainer.parameter_server.server.connection_limit import ConnectionLimit
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.server.snapshots import Snapshots
from disttrain_trainer.runtime.errors import PeerLost, PortInUse

_TICK_MILLISECONDS = 500


class Loop:
    """Server loop. `dropped` counts messages that cannot be read."""

    def __init__(self, server: Server, key: bytes, address: str, snapshots: Snapshots | None = None) -> None:
        """`key`: of the job's attempt. `address`: host:port as workers know it. Raises PortInUse."""
        self._snapshots = snapshots
        self._server, self._key = server, key_with(server.index, key)
        self._context = new_context(server.workers)
        self._socket = server_socket(self._context, self._key)
        self._connections = ConnectionLimit(self._context, self._socket, _log)
        self.dropped = 0
        host, _, port = address.rpartition(":")
        try:
            self._socket.bind(f"tcp://{_listening_on(host)}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise PortInUse(f"cannot listen on port {port}: {error.strerror}; use a free port") from error

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until the server must stop and the work is finished, as the last checkpoint needs its parameters, or no
        worker is left to finish it.

        Raises PeerLost where a newer incarnation of this server is known to be at work.
        """
        stopped = False
        while not (stopped and (self._server.finished or self._server.has_no_workers(time.monotonic()))):
            if self._socket.poll(_TICK_MILLISECONDS):
                self._receive()
            self._send(self._server.tick(time.monotonic()))
            if self._server.superseded:
                raise PeerLost("a newer incarnation of this parameter server is at work; this one ends")
            snapshot = self._server.snapshot() if self._snapshots is not None else None
            if self._snapshots is not None and snapshot is not None:
                # Waits for the one before: so less than two intervals are ever lost.
                self._snapshots.write(snapshot)
            if stopping() and not stopped:
                stopped = True
                # A server that may be replaced goes on while it may: the workers say whether the job is to stop.
                if self._snapshots is None:
                    self._send(self._server.stop(time.monotonic()))

    def close(self) -> None:
        self._connections.close()
        self._socket.close(linger=1000)
        self._context.term()

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        try:
            message = decode([frame.buffer for frame in frames[2:]], self._key)
        except Malformed:
            self.dropped += 1
            return
        sender = (frames[0].bytes, frames[1].bytes)
        if message.kind == "figures":
            message = Message("figures", {**message.fields, "dropped": self.dropped})
        try:
            answers = self._server.receive(sender, message, time.monotonic())
        except Malformed as error:
            answers = [(sender, Message("refused", {"reason": str(error)}))]
        self._send(answers)

    def _send(self, answers: Answers) -> None:
        for receiver, answer in answers:
            message = Message(answer.kind, {**answer.fields, "server": self._server.identity()}, answer.tensors)
            # Not to wait for a worker that is gone; who lives asks for one thing at a time.
            with suppress(zmq.Again):
                self._socket.send_multipart([*receiver, *encode(message, self._key)], zmq.NOBLOCK, copy=False)


def _log(sentence: str) -> None:
    # A log that cannot be written must not end the thread that limits connections.
    with suppress(OSError):
        print(f"disttrain: {sentence}", file=sys.stderr, flush=True)


def _listening_on(host: str) -> str:
    """The address itself where it is one of this machine's, as in a local run; in a pod, whose host is a name, all."""
    with suppress(ValueError):
        return f"[{host}]" if ipaddress.ip_address(host.strip("[]")).version == 6 else host
    return "*"
