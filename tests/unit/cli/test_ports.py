"""Ports of a local run: free, different, and none that the kernel gives away in the meantime."""

import socket
from contextlib import ExitStack

import pytest

from disttrain.errors import CommandError
from disttrain.local import ports
from disttrain.local.ports import free_ports
from tools.cluster.ports import free_port


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Instead of those that a local run may take meanwhile: a few that are this process's."""
    found = [free_port() for _ in range(20)]
    monkeypatch.setattr(ports, "_CANDIDATES", found)
    return found


def test_they_are_below_those_of_connections():
    assert max(ports._CANDIDATES) < 32_768


def test_ports_are_free_and_different(candidates: list[int]):
    found = free_ports(20)
    assert sorted(found) == sorted(candidates)
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_ports_that_are_taken_are_left_out(candidates: list[int]):
    with ExitStack() as stack:
        for port in candidates[1:]:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert free_ports(1) == candidates[:1]
        with pytest.raises(CommandError, match=r"free ports of 127\.0\.0\.1 .*: 1, the job needs 2"):
            free_ports(2)
