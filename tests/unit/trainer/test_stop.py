"""SIGTERM is heard in the loop, whatever a user's code has done to signals before."""

import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_trainer.checkpoint.storage import require_shared
from disttrain_trainer.runtime.errors import InvalidConfiguration, describe
from tests.waiting import GENEROUS

PROGRAM = """
import asyncio, os, signal, socket, threading
from disttrain_trainer.runtime.stop import StopRequest
stop = StopRequest.on_sigterm()
{changes}
stop.loop_started(None)
os.kill(os.getpid(), signal.SIGTERM)
print(stop._requested.wait({seconds}))
"""
BACK = "disttrain: SIGTERM: {} had been replaced and is put back: a stop leaves a checkpoint\n"
HANDLER, DESCRIPTOR = "its handler", "Python's wake-up descriptor"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("", ""),
        ("signal.signal(signal.SIGTERM, lambda *_: print('own'))", ""),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL)", BACK.format(HANDLER)),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", BACK.format(HANDLER)),
        ("signal.set_wakeup_fd(-1)", BACK.format(DESCRIPTOR)),
        ("a, b = socket.socketpair(); b.setblocking(False); signal.set_wakeup_fd(b.fileno())", BACK.format(DESCRIPTOR)),
        (
            "async def own(): asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)\nasyncio.run(own())",
            BACK.format(f"{HANDLER} and {DESCRIPTOR}"),
        ),
    ],
    ids=["nothing", "a handler", "the default", "ignored", "no descriptor", "another descriptor", "asyncio"],
)
def test_the_loop_receives_sigterm(changes: str, sentence: str) -> None:
    program = PROGRAM.format(changes=changes, seconds=GENEROUS)
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * GENEROUS, check=False)
    assert (found.returncode, found.stderr) == (0, sentence)
    assert found.stdout.splitlines() == [*(["own"] if "own'" in changes else []), "True"]


TWICE = f"""
import os, signal, socket, threading
from disttrain_trainer.runtime.connections import cut_connections
from disttrain_trainer.runtime.stop import StopRequest
listener = socket.create_server(("127.0.0.1", 0))
ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
others = socket.socketpair()
stop, ended = StopRequest.on_sigterm(), threading.Event()
stop.end_waits = lambda: (cut_connections(), ended.set())
stop.loop_started(None)
os.kill(os.getpid(), signal.SIGTERM)
stop._requested.wait({GENEROUS})
print(ended.is_set())
os.kill(os.getpid(), signal.SIGTERM)
print(ended.wait({GENEROUS}), ours.recv(1), theirs.recv(1))
others[0].send(b"y")
print(others[1].recv(1), socket.create_connection(listener.getsockname()).fileno() > 0)
"""


def test_a_second_sigterm_ends_connections_with_other_machines_and_nothing_else() -> None:
    command = [sys.executable, "-c", TWICE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * GENEROUS, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == ["False", "True b'' b''", "b'y' True"]


def test_a_folder_that_no_report_can_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "data\udcff" / "job"
    with pytest.raises(InvalidConfiguration) as refused:
        require_shared(folder, None)
    assert "data\\udcff/job is no text in UTF-8, in which reports name" in describe(refused.value).message
    assert list(tmp_path.iterdir()) == []
