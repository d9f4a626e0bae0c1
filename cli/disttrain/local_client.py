"""The Python client for this machine: the calls of `Client`, without a cluster.

>>> from disttrain import LocalClient
>>> client = LocalClient()
>>> job = client.submit("examples/ddp.yaml")  # doctest: +SKIP
>>> client.wait(job.name).phase  # doctest: +SKIP
'Succeeded'
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from disttrain.client import body_of
from disttrain.cluster.api import Raw
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain.local.folder import DEFAULT_RUNS, METRICS_FILE, RunFolder, new_run
from disttrain.logs.figures import Row
from disttrain.logs.pick import BEFORE
from disttrain.terminal import last_lines, plain_log
from disttrain_agent.checkpoint_request import request_checkpoint
from disttrain_agent.environment import report_dir
from disttrain_api import manifest
from disttrain_api.spec import DistTrainingJob
from disttrain_api.status import ConditionType

_LOOK_SECONDS = 0.2
_OUTPUT = "command.log"
_ATTEMPT = re.compile(r"-a(\d+)\.log")


class LocalClient:
    """Jobs as processes of this machine, as `disttrain run` starts them, each in a folder of `runs`.

    A job goes on when this program ends. All methods raise CommandError with a sentence for people.
    """

    def __init__(self, *, runs: str | Path = DEFAULT_RUNS) -> None:
        self._runs = Path(runs).absolute()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, job: "str | Path | Raw | DistTrainingJob") -> RemoteJob:
        """Start a job from a file, a dict or a model. Raises ManifestError where it is wrong."""
        model = job if isinstance(job, DistTrainingJob) else manifest.of_object(body_of(job))
        folder, raw = new_run(self._runs, model)
        self._start(folder.path)
        return RemoteJob(raw)

    def _start(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", "disttrain.main", "run", "--resume", str(folder)]
        with (folder / _OUTPUT).open("wb") as output:
            self._processes[str(folder)] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True
            )

    def get(self, name: str) -> RemoteJob:
        """Return the newest job of that name as it is now."""
        return RemoteJob(RunFolder(self._folder(name)).read_job())

    def wait(
        self,
        name: str,
        *,
        timeout: float | None = None,
        on_change: Callable[[RemoteJob], object] = lambda job: None,
    ) -> RemoteJob:
        """Return the job once it has finished, or was suspended. Raises TimeoutError after `timeout` seconds."""
        folder, until = self._folder(name), None if timeout is None else time.monotonic() + timeout
        last: Raw | None = None
        while True:
            over = self._is_over(folder)
            job = RemoteJob(RunFolder(folder).read_job())
            if job.raw.get("status") != last:
                last = job.raw.get("status")
                on_change(job)
            if job.finished or (over and job.holds(ConditionType.SUSPENDED)):
                return job
            if over:
                raise CommandError(f"{name} did not come to an end: {_last_log_lines(folder)}")
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{name} has not finished within {timeout:g} s: it is {job.phase}")
            time.sleep(_LOOK_SECONDS)

    def logs(
        self,
        name: str,
        *,
        ranks: set[int] | None = None,
        attempt: int | None = None,
        tail: int | None = None,
    ) -> Iterator[str]:
        """Yield the log lines that there are, pod after pod, each with its rank before it.

        ranks: absent, all. attempt: absent, the last one. tail: the last lines of each pod alone.
        """
        files = sorted((self._folder(name) / "logs").glob("*.log"))
        numbers = {file: int(match[1]) for file in files if (match := _ATTEMPT.search(file.name))}
        wanted = attempt if attempt is not None else max(numbers.values(), default=0)
        for file in (file for file in files if numbers.get(file) == wanted):
            lines = [plain_log(line) for line in file.read_bytes().splitlines()]
            lines = [line for line in lines if ranks is None or _rank(line) in ranks]
            yield from lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]

    def metrics(self, name: str) -> list[Row]:
        """Return the lines of the job's metrics.jsonl, of all attempts. `pandas.DataFrame` takes them as they are."""
        try:
            text = (RunFolder(self._folder(name)).metrics / METRICS_FILE).read_text()
        except FileNotFoundError:
            return []
        # The last line may still be written.
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def suspend(self, name: str) -> RemoteJob:
        """Ask the job's ranks to write a checkpoint and stop; return the job once they have."""
        self._signal(name, signal.SIGTERM)
        return self.get(name)

    def resume(self, name: str) -> RemoteJob:
        """Resume a suspended job from its last checkpoint."""
        folder = self._folder(name)
        if not self._is_over(folder):
            raise CommandError(f"{name} runs already")
        self._start(folder)
        return self.get(name)

    def checkpoint(self, name: str) -> RemoteJob:
        """Ask the job's ranks for a checkpoint. It runs on meanwhile. Raises CommandError where none takes it."""
        folder = self._folder(name)
        if self._is_over(folder):
            raise CommandError(f"{name} cannot be asked for a checkpoint: it does not run ({self.get(name).phase})")
        if not any(request_checkpoint(report_dir(scratch)) for scratch in (folder / "pods").glob("*")):
            raise CommandError(
                f"{name} takes no request for a checkpoint: it does not train now, has no `storage`, has parameter"
                " servers, or a command of its own without a session"
            )
        return self.get(name)

    def delete(self, name: str) -> None:
        """Stop the job at once. Its folder stays, with logs and checkpoints."""
        self._signal(name, signal.SIGKILL)

    def _signal(self, name: str, number: signal.Signals) -> None:
        folder = self._folder(name)
        process = self._processes.get(str(folder))
        if process is None and not self._is_over(folder):
            raise CommandError(f"{name} was started by another program, which alone can stop it")
        if process is not None and process.poll() is None:
            # No process outlives the command, not even where it is killed: see disttrain.local.keeper.
            os.kill(process.pid, number)
            process.wait()

    def _is_over(self, folder: Path) -> bool:
        """Whether no command works on the job; one that another program has started is seen by its lock."""
        process = self._processes.get(str(folder))
        if process is not None:
            return process.poll() is not None
        try:
            with RunFolder(folder).locked():
                return True
        except CommandError:
            return False

    def _folder(self, name: str) -> Path:
        found = [path for path in self._runs.glob("*-?????") if path.name[:-6] == name]
        if not found:
            raise CommandError(f"no job {name} in {self._runs}")
        return max(found, key=lambda path: path.stat().st_ctime)


def _rank(line: str) -> int | None:
    match = BEFORE.match(line)
    return int(match[2]) if match is not None and match[2] is not None else None


def _last_log_lines(folder: Path) -> str:
    lines = (folder / _OUTPUT).read_text(errors="replace").splitlines() if (folder / _OUTPUT).exists() else []
    return last_lines(lines, 1)[0] if lines else "it was stopped"
