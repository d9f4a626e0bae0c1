"""Ranks of the trainer for benchmarks: processes on the loopback that end with this one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.cluster.ports import free_port
from tools.cluster.processes import dying_with_parent

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 600


class RanksFailed(SystemExit):
    """A rank failed, or did not end in time; a benchmark that does not catch it ends."""


def job(training: dict[str, Any], parallelism: dict[str, Any] | None = None) -> dict[str, Any]:
    """job.json around the `training` of a manifest; its checkpoints and metrics lie in the folder `benchmark`."""
    return {
        "name": "benchmark",
        "namespace": "default",
        "uid": "1",
        "parallelism": parallelism or {},
        "training": training,
        "checkpointFolder": "benchmark",
    }


def run(
    folder: Path, module: str, ranks: int, *arguments: str, threads: int = 1, seconds: float = LIMIT_SECONDS
) -> str:
    """Run `module` for the job.json in the folder, which is its storage, too; what rank 0 prints.

    Raises RanksFailed where a rank fails, or has not ended after so many seconds.
    """
    port = str(free_port())
    own = [str(REPOSITORY / part) for part in (".", "api", "trainer_image")]
    # Torch may lie on the path that this process was given.
    paths = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": paths,
            "DISTTRAIN_CONFIG": str(folder / "job.json"),
            "DISTTRAIN_STORAGE": str(folder),
        }
        command = dying_with_parent([sys.executable, "-m", module, *arguments])
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise RanksFailed(f"{module} did not end within {seconds:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        raise RanksFailed(f"{module} ended with {codes}")
    return outputs[0]


def train(described: dict[str, Any], ranks: int, seconds: float = LIMIT_SECONDS) -> list[dict[str, Any]]:
    """Run the trainer; its logged steps, as metrics.jsonl has them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(described))
        run(folder, "disttrain_trainer", ranks, seconds=seconds)
        lines = [json.loads(line) for line in (folder / "benchmark" / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "lr" in line]
