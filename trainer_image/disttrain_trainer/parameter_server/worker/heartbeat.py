"""A thread that sends every server a heartbeat each second, and receives whether servers live, and their incarnations.

Whoever talks with a server knows its newest incarnation, passes it on, and listens to no earlier one: a server that
hung, was replaced and wakes up is fenced off (epochs: Gray and Cheriton, SOSP 1989; Ongaro and Ousterhout's terms,
USENIX ATC 2014; incarnations here, as epochs are the data's).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from disttrain_trainer.parameter_server.protocol.sockets import connect, reconnect
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message, decode, encode
from disttrain_trainer.parameter_server.worker.failure_detector import FailureDetector
from disttrain_trainer.parameter_server.worker.worker_progress import WorkerProgress

_INTERVAL_SECONDS = 1.0


class Heartbeat:
    """`failure` says in a sentence what is wrong with a server, once something is."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], keys: Sequence[bytes], worker: int,
        instance: str, progress: WorkerProgress, stopping: Callable[[], bool], patience: float, replaceable: bool,
    ) -> None:  # fmt: skip
        """`keys`: with each server. `progress`: reported to a restarted manager. `patience`: seconds within which a
        server must answer for the first time, and again while it is away. `replaceable`: servers may be restarted and
        resume."""
        self._addresses, self._keys, self._stopping, self._progress = addresses, keys, stopping, progress
        self._fields = {"worker": worker, "instance": instance}
        self._context = context
        self._lock = threading.Lock()
        self._instances: dict[int, str] = {}
        self._replaceable = replaceable
        self.restarts = [0] * len(addresses)
        """How often each server was seen to have been started anew."""
        self.incarnations = [0] * len(addresses)
        """The newest known incarnation of each server; 0: none yet."""
        self.reconnects = [0] * len(addresses)
        """How often each server should have been connected to anew."""
        self._detectors = [FailureDetector(max(1, int(patience / _INTERVAL_SECONDS)), replaceable) for _ in addresses]
        self._ended = threading.Event()
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def accept(self, index: int, answer: Message) -> bool:
        """A server has answered; of both threads. False where a newer incarnation of it is known. Raises Malformed."""
        found = answer.fields.get("server")
        identity = Message("server", found if isinstance(found, dict) else {})
        instance = str(identity.fields.get("instance"))
        incarnation, incarnations = identity.number("incarnation"), identity.numbers("incarnations")
        with self._lock:
            for server, newest in enumerate(incarnations[: len(self.incarnations)]):
                self.incarnations[server] = max(self.incarnations[server], newest)
            if incarnation < self.incarnations[index]:
                return False
            self._detectors[index].end()
            if self._instances.setdefault(index, instance) != instance:
                self._instances[index] = instance
                self.restarts[index] += 1
                if not self._replaceable or identity.fields.get("restored") is not True:
                    self.failure = f"{self._name(index)} was started anew and has lost what it held"
            return True

    def end(self) -> None:
        """Stop and close the sockets."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        sockets = [connect(self._context, *one) for one in zip(self._addresses, self._keys, strict=True)]
        monitors = [socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED) for socket in sockets]
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._ended.wait(_INTERVAL_SECONDS) and self.failure is None:
            self._beat(sockets)
            for socket, _ in poller.poll(100):
                self._listen(sockets.index(socket), socket)
            for index, monitor in enumerate(monitors):
                while monitor.poll(0):
                    event = recv_monitor_message(monitor)["event"]
                    self._detectors[index].listening = event == zmq.EVENT_CONNECTED
            self._judge()
        for socket in sockets:
            socket.disable_monitor()
            socket.close(linger=0)
        for monitor in monitors:
            monitor.close(linger=0)

    def _beat(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        fields = {**self._fields, "stopping": self._stopping(), "incarnations": self.incarnations}
        message = Message("alive", fields)
        for index, socket in enumerate(sockets):
            with self._lock:
                must_reconnect = self._detectors[index].beat()
            if must_reconnect:
                self.reconnects[index] += 1
                reconnect(socket, self._addresses[index])
            with suppress(zmq.Again):
                socket.send_multipart([b"", *encode(message, self._keys[index])], zmq.NOBLOCK)

    def _listen(self, index: int, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again, Malformed):
            while True:
                answer = decode(socket.recv_multipart(zmq.NOBLOCK)[1:], self._keys[index])
                report = self._progress.report() if answer.fields.get("report") is True else None
                if self.accept(index, answer) and report is not None:
                    message = Message(report.kind, {**report.fields, "incarnations": self.incarnations})
                    socket.send_multipart([b"", *encode(message, self._keys[index])], zmq.NOBLOCK)

    def _judge(self) -> None:
        for index, detector in enumerate(self._detectors):
            if detector.failed and self.failure is None:
                self.failure = f"{self._name(index)} has not answered for {detector.beats * _INTERVAL_SECONDS:g} s"

    def _name(self, index: int) -> str:
        return f"parameter server {index} at {self._addresses[index]}"
