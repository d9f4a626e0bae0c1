"""Ports of a local run: free, different, and none that the kernel gives away in the meantime."""

import socket

import pytest

from disttrain.errors import CommandError
from disttrain.local import ports
from disttrain.local.ports import free_ports


def test_ports_are_free_different_and_never_given_to_a_connection():
    found = free_ports(50)
    assert len(set(found)) == 50
    assert all(20_000 <= port < 30_000 for port in found)
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_ports_that_are_taken_are_left_out(monkeypatch: pytest.MonkeyPatch):
    first, second = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        monkeypatch.setattr(ports, "_CANDIDATES", [first, second])
        assert free_ports(1) == [second]
        with pytest.raises(CommandError, match=r"free ports of 127\.0\.0\.1 .*: 1, the job needs 2"):
            free_ports(2)
