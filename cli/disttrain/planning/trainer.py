"""The trainer's own estimates and measurements, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from disttrain.errors import CommandError
from disttrain.extras import require
from disttrain.planning.objects import Planned
from disttrain_api.spec import DistTrainingJob
from disttrain_operator.plan.desired import job_config

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Request:
    """A rank of a job."""

    manifest: DistTrainingJob
    rank: int


def answers(requests: Sequence[Request]) -> Generator[Mapping[str, Any], None, None]:
    """Yield the trainer's answer to each request, as soon as it is there. Raises CommandError.

    The trainer ends where the iterator is closed.
    """
    with tempfile.TemporaryDirectory(prefix="disttrain-plan-") as folder:
        asked, results = Path(folder, "requests.jsonl"), Path(folder, "results.jsonl")
        asked.write_text("".join(_line(request, Path(folder, f"{at}.json")) for at, request in enumerate(requests)))
        with _started("disttrain_trainer.estimate", str(asked), str(results)) as running:
            yield from _lines(running, results, len(requests))


def matmul_flops(number_format: str, threads: int) -> float:
    """Return the FLOP/s of this machine's processor. Raises CommandError."""
    with tempfile.TemporaryDirectory(prefix="disttrain-plan-") as folder:
        result = Path(folder, "result.json")
        options = (f"--format={number_format}", f"--threads={threads}")
        with _started("disttrain_trainer.estimate.rate", str(result), *options) as running:
            (found,) = _lines(running, result, 1)
    return float(found)


def _line(request: Request, job: Path) -> str:
    spec, metadata = request.manifest.spec, request.manifest.metadata
    config = job_config(Planned(metadata.name, metadata.namespace or "default", spec))
    assert config is not None
    job.write_text(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_none=True)))
    servers = spec.parameter_servers.replicas if spec.parameter_servers is not None else 0
    shape = {"ranks": spec.world_size, "ranks_per_pod": spec.workers.ranks_per_pod, "servers": servers}
    return json.dumps({"job": str(job), "rank": request.rank, **shape}) + "\n"


@dataclass(frozen=True)
class _Running:
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]

    def last_line(self) -> str:
        """Return what it has written last on standard error."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]


@contextmanager
def _started(module: str, *arguments: str) -> Iterator[_Running]:
    """A module of the trainer, which sees no GPU; it is gone when the context is left."""
    require("the trainer cannot be asked")
    # As `disttrain run` does: entry points may lie in the current folder.
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            yield _Running(process, errors)
        finally:
            process.kill()
            process.wait()


def _lines(running: _Running, results: Path, count: int) -> Iterator[Any]:
    """Yield so many lines of JSON that the process writes. Raises CommandError where it ends before."""
    done = 0
    while done < count:
        ended = running.process.poll()
        whole = (results.read_text() if results.exists() else "").rpartition("\n")[0].splitlines()
        for line in whole[done:count]:
            yield json.loads(line)
        done = max(done, len(whole))
        if done < count and ended is not None:
            raise CommandError(f"the trainer ended with exit code {ended} without an estimate: {running.last_line()}")
        if done < count:
            time.sleep(_POLL_SECONDS)
