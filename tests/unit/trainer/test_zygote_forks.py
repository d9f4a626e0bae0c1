"""The process that ranks are forked from forks none that could not use their GPU."""

import socket
import subprocess
import sys

import pytest

from disttrain_agent.zygote import READY
from tests.waiting import GENEROUS

PROGRAM = "import sys; from disttrain_trainer import zygote; zygote._MODULES = sys.argv[1:]; sys.exit(zygote.main())"
# As torch does, which notes it in forks alone.
MET = """
import os, torch
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


@pytest.mark.parametrize(("imported", "heard"), [("import torch", READY), (MET, b"")], ids=["clean", "met the driver"])
def test_it_is_ready_only_where_no_import_has_met_the_gpus_driver(tmp_path, monkeypatch, imported, heard):
    (tmp_path / "ahead.py").write_text(imported)
    monkeypatch.syspath_prepend(tmp_path)
    ours, theirs = socket.socketpair()
    ours.settimeout(GENEROUS)
    with ours, theirs:
        environment = {"PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-P", "-c", PROGRAM, "ahead"]
        with subprocess.Popen(command, stdin=theirs.fileno(), env=environment) as zygote:
            theirs.close()
            try:
                assert ours.recv(1) == heard
                ours.shutdown(socket.SHUT_WR)
                assert zygote.wait(GENEROUS) == 0
            finally:
                zygote.kill()
