import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster import full
from tools.cluster.paths import state_folder
from tools.cluster.processes import ProcessId


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return state_folder()


def us() -> ProcessId:
    process = ProcessId.of(os.getpid())
    assert process
    return process


def ended() -> ProcessId:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ProcessId.of(child.pid)
    assert process
    return process


def leave(state: Path, owner: ProcessId | None) -> None:
    """What `up` writes first."""
    if owner:
        full.take(owner)
    state.mkdir(parents=True, exist_ok=True)
    full.sign()


def test_where_there_is_no_cluster_nothing_is_replaced():
    assert full.why_replaced() is None


@pytest.mark.parametrize("owner", [None, us()], ids=["nobody's", "ours"])
def test_a_cluster_of_nobody_or_of_a_living_process_is_taken_over(state: Path, owner: ProcessId | None):
    leave(state, owner)
    assert full.why_replaced() is None


def test_a_cluster_whose_owner_was_killed_is_replaced(state: Path):
    owner = ended()
    leave(state, owner)
    assert full.why_replaced() == (f"the cluster was left by process {owner.pid}, which ended without taking it down")


def test_a_cluster_of_other_code_is_replaced(state: Path):
    state.mkdir(parents=True)
    assert full.why_replaced() == "the cluster was started by another version of tools/cluster"


@pytest.mark.parametrize("last", [None, ended()], ids=["nobody's", "another's"])
def test_an_owner_takes_down_only_its_own_cluster(state: Path, last: ProcessId | None):
    leave(state, last)
    assert not full.down(us())
    assert state.exists()
