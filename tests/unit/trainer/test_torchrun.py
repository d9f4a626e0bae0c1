"""torchrun as it is installed here says of a rank that failed what is read from its log (see tests/recorded)."""

import subprocess
import sys

import pytest

from disttrain_api.program_log import Child, torchrun_child
from tests.unit.trainer.worlds import WITHIN_SECONDS
from tools.cluster.ports import free_port

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if "exit" in sys.argv:
            sys.exit(3)
        raise ValueError("a sample that cannot be read")
    dist.barrier()

(record(main) if "recorded" in sys.argv else main)()
"""
VALUE_ERROR = "ValueError: a sample that cannot be read"


@pytest.mark.parametrize(
    ("how", "child"),
    [
        ("raise", Child(1, 1, VALUE_ERROR)),
        ("recorded", Child(1, 1, VALUE_ERROR)),
        ("kill", Child(1, -9)),
        ("exit", Child(1, 3)),
    ],
)
def test_the_rank_that_failed_is_read_from_what_torchrun_prints(tmp_path, how, child):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    ended = subprocess.run(
        [*launcher, str(program), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_SECONDS,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert torchrun_child(ended.stdout) == child, ended.stdout
