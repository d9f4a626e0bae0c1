"""How long `disttrain run` takes for a job of one step, from the command to its end; ranks on gloo.

References: the same command with ranks that each import torch for themselves, and torchrun with a bare loop that
imports nothing but torch and makes one step of DDP.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import harness

PACKAGES = ("api", "operator", "trainer_image", "cli")
TRAINING = {
    "model": {"name": "mlp"},
    "data": {"name": "synthetic", "config": {"kind": "Images", "size": 128}},
    "optimizer": {"name": "SGD", "learningRate": 0.1},
    "steps": 1,
    "globalBatchSize": 64,
}
DISTTRAIN = [sys.executable, "-m", "disttrain.main", "run", "job.yaml"]
ALONE = """
import sys
import disttrain.run
from disttrain.main import main
disttrain.run.modules_of = lambda spec: ()
sys.exit(main(["run", "job.yaml"]))
"""
APART = [sys.executable, "-c", ALONE]
BARE = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.zeros(8, dtype=torch.long)).backward()
optimizer.step()
dist.barrier()
os._exit(0)
"""


def measure(quick: bool) -> Iterator[harness.Row]:
    for ranks in (2,) if quick else (2, 4, 8):
        torchrun = [str(Path(sys.executable).with_name("torchrun")), f"--nproc-per-node={ranks}", "bare.py"]
        taken: dict[str, list[float]] = {"forked": [], "apart": [], "torchrun": []}
        for _ in range(1 if quick else 5):
            for name, command in (("forked", DISTTRAIN), ("apart", APART), ("torchrun", torchrun)):
                taken[name].append(seconds(command, ranks))
        yield harness.row(f"{ranks} ranks, beside ranks that import", "s", taken["forked"], taken["apart"])
        yield harness.row(f"{ranks} ranks, beside torchrun", "s", taken["forked"], taken["torchrun"])


def seconds(command: Sequence[str], ranks: int) -> float:
    """Seconds of the whole command, in a folder of its own."""
    job = {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": "start"},
        "spec": {"workers": {"replicas": ranks}, "training": TRAINING},
    }
    paths = os.pathsep.join(str(REPOSITORY / package) for package in PACKAGES)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(yaml.safe_dump(job))
        Path(folder, "bare.py").write_text(BARE)
        begin = time.monotonic()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        taken = time.monotonic() - begin
    if done.returncode != 0:
        raise SystemExit(f"{command[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return taken


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
