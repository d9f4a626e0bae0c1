"""A thread that tells every server each second that this worker lives, and hears whether they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from disttrain_trainer.parameter_server.wire import Malformed, Message, decode, encode

_INTERVAL_SECONDS = 1.0
_SILENT_BEATS = 60
"""Beats without an answer after which a server that has answered before counts as hung.

Beats, not seconds: a worker that was itself stopped for a while has sent none.
"""


class Heartbeat:
    """`failure` says in a sentence what is wrong with a server, once something is."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], key: bytes, worker: int, life: str,
        stopping: Callable[[], bool], patience: float, replaceable: bool,
    ) -> None:  # fmt: skip
        """`patience`: seconds within which a server must answer for the first time. `replaceable`: servers but the
        first may be started anew and go on."""
        self._addresses, self._key, self._stopping = addresses, key, stopping
        self._fields = {"worker": worker, "life": life}
        self._patience = max(1, int(patience / _INTERVAL_SECONDS))
        self._context = context
        self._lock = threading.Lock()
        self._lives: dict[int, str] = {}
        self._replaceable = replaceable
        self.restarts = [0] * len(addresses)
        """How often each server was seen to have been started anew."""
        self._silent = [0] * len(addresses)
        self._ended = threading.Event()
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def heard(self, index: int, answer: Message) -> None:
        """A server has answered; of both threads."""
        life = str(answer.fields.get("life"))
        with self._lock:
            if self._lives.setdefault(index, life) == life:
                return
            self._lives[index] = life
            self.restarts[index] += 1
            if index == 0 or not self._replaceable:
                self.failure = f"{self._name(index)} was started anew and has lost what it held"

    def end(self) -> None:
        """Stop and close the sockets."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        sockets = [connect(self._context, address) for address in self._addresses]
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._ended.wait(_INTERVAL_SECONDS) and self.failure is None:
            self._beat(sockets)
            for socket, _ in poller.poll(100):
                self._listen(sockets.index(socket), socket)
            self._judge()
        for socket in sockets:
            socket.close(linger=0)

    def _beat(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        message = Message("alive", {**self._fields, "stopping": self._stopping()})
        for index, socket in enumerate(sockets):
            self._silent[index] += 1
            with suppress(zmq.Again):
                socket.send_multipart([b"", *encode(message, self._key)], zmq.NOBLOCK)

    def _listen(self, index: int, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again, Malformed):
            while True:
                answer = decode(socket.recv_multipart(zmq.NOBLOCK)[1:], self._key)
                self._silent[index] = 0
                self.heard(index, answer)

    def _judge(self) -> None:
        for index, silent in enumerate(self._silent):
            limit = _SILENT_BEATS if index in self._lives else self._patience
            if silent >= limit and self.failure is None:
                self.failure = f"{self._name(index)} has not answered for {silent * _INTERVAL_SECONDS:g} s"

    def _name(self, index: int) -> str:
        return f"parameter server {index} at {self._addresses[index]}"


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket to the server at host:port, which need not be there yet."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.connect(f"tcp://{address}")
    return socket
