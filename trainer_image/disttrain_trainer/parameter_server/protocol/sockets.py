"""ZeroMQ sockets between workers and servers: encrypted, authenticated, and closed to peers without the attempt's key.

CURVE (CurveZMQ, RFC 26) keys each connection anew, counts its messages and authenticates every byte, so nothing can be
changed, sent again or put in between. A server's key pair is made of the job's token (wire.key_with); as its public
half is known to who has the token only, and a connection begins with a box made for it, nobody else gets as far as a
message. Before that a connection holds at most one frame, for seconds, and there are so many of them at most
(server/connection_limit.py).
"""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

from disttrain_trainer.parameter_server.protocol.wire import FRAME_BYTES
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.host_limits import cores

_HANDSHAKE_MILLISECONDS = 10_000
_WAITING_MESSAGES = 256
"""Messages of one worker that wait on a busy server; more of them wait on the worker. A push has about 64 at most."""
_BACKLOG = 1024
_MAX_THREADS = 4
"""Each moves a gigabyte per second or so."""
_CURVE_BYTES = 64
"""What CURVE adds to a frame, rounded up."""
_LOST_MILLISECONDS = 60_000
"""Without the other side's word, after which the system gives a connection up: neither data nor probes reach it."""

Context = zmq.Context[zmq.Socket[bytes]]


def new_context(peers: int) -> Context:
    """Return a context with threads enough to encrypt and decrypt what goes to and comes from so many at once."""
    return zmq.Context(max(1, min(_MAX_THREADS, peers, cores() // 2)))


def server_socket(context: Context, key: bytes) -> zmq.Socket[bytes]:
    """Return a ROUTER that only peers with the key can reach. `key`: of the server (wire.key_with)."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, _secret(key))
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
    socket.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    return socket


def connect(context: Context, address: str, key: bytes) -> zmq.Socket[bytes]:
    """Return a socket to the server at host:port, which need not be there yet. `key`: of the server."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_secret(key)))
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # A connection that is given up would wait for ever to send the rest, and so would the end of the process.
    socket.setsockopt(zmq.LINGER, 0)
    # What is computed may take minutes in which this connection is idle, and who forwards it may forget it.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, _LOST_MILLISECONDS)
    socket.connect(f"tcp://{address}")
    return socket


def reconnect(socket: zmq.Socket[bytes], address: str) -> None:
    """Give up the connection, and what is still on its way, and look the server up anew."""
    socket.disconnect(f"tcp://{address}")
    socket.connect(f"tcp://{address}")


def _secret(key: bytes) -> bytes:
    """The server's secret key, in ZeroMQ's letters. Raises InvalidConfiguration where ZeroMQ cannot encrypt."""
    if not zmq.has("curve"):
        raise InvalidConfiguration(
            "this build of pyzmq cannot encrypt (no CURVE), as parameter servers must: install it from a wheel"
        )
    return z85.encode(hmac.digest(key, b"curve", "sha256"))
