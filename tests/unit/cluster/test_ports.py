"""Ports for tests: free, and no other process's, which may not listen yet."""

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from disttrain.local.ports import _CANDIDATES
from tests.unit.trainer.worlds import ROOT
from tests.waiting import GENEROUS
from tools.cluster import ports
from tools.cluster.full import API_SERVER_PORT, ETCD_PORTS
from tools.cluster.ports import free_port

ASK = "from tools.cluster.ports import free_port; print(*(free_port() for _ in range(50)), flush=True); input()"


def test_processes_that_run_at_the_same_time_are_given_different_ones():
    asked = [
        subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(5)
    ]
    try:
        given = [int(port) for one in asked for port in one.stdout.readline().split()]
    finally:
        for one in asked:
            one.communicate(b"\n", timeout=GENEROUS)
    assert len(given) == 250
    assert len(set(given)) == 250
    assert not set(given) & set(_CANDIDATES), "`disttrain run` may take these"


@pytest.fixture
def block(monkeypatch):
    """Three ports, of which none has been given."""
    _, whole = ports._own_block()
    monkeypatch.setattr(ports, "_given", {})
    monkeypatch.setattr(ports, "_own_block", lambda: (None, whole[:4]))
    return whole[1:4]


def test_one_that_is_taken_is_left_out(block):
    with ExitStack() as stack:
        for port in block[:2]:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert free_port() == block[2]
        stack.enter_context(socket.socket()).bind(("127.0.0.1", block[2]))
        with pytest.raises(RuntimeError, match=r"no port of \d+ to \d+ on 127\.0\.0\.1 is free"):
            free_port()


def test_one_that_was_given_comes_again_after_all_others(block):
    given = [free_port() for _ in range(3)]
    assert sorted(given) == list(block)
    assert [free_port() for _ in range(6)] == given + given


def test_the_cluster_has_none_that_others_are_given():
    given = {*_CANDIDATES, *(port for block in ports._BLOCKS for port in block)}
    assert not given & {API_SERVER_PORT, *ETCD_PORTS}
