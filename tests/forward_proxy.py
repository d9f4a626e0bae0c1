"""A forward proxy on loopback: it tunnels by CONNECT and passes plain requests on, whatever the name, to one server."""

import socket
import threading
from contextlib import suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import TracebackType
from typing import Self


class ForwardProxy:
    """Use as a context manager. Names need not exist: everything goes to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        """For each connection: the first line's method and address, and the Proxy-Authorization."""
        proxy = self

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = self.rfile.readline()
                    if not line:
                        return
                    head += line
                first, *headers = head.decode().split("\r\n")
                fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in headers)}
                method, address, _ = first.split(" ")
                proxy.asked.append((f"{method} {address}", fields.get("proxy-authorization")))
                with suppress(OSError), socket.create_connection(target) as server:
                    if method == "CONNECT":
                        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    else:
                        path = "/" + address.split("://", 1)[1].partition("/")[2]
                        server.sendall(head.replace(address.encode(), path.encode(), 1))
                    back = threading.Thread(target=_copy, args=(server, self.connection), daemon=True)
                    back.start()
                    while data := self.rfile.read1(65536):  # type: ignore[attr-defined]
                        server.sendall(data)
                    server.shutdown(socket.SHUT_WR)
                    back.join()

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
