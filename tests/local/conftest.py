"""`disttrain run` as a process in a folder of its own, and everything below it."""

import contextlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.builders import a_manifest
from tests.chaos import runs
from tests.suites import GATE

GENEROUS = 120.0 if GATE else 240.0
"""Seconds: also for a whole run, which on a fresh machine reads torch from the disk first."""

DISTTRAIN = [sys.executable, "-m", "disttrain.main"]


class Run:
    """One `disttrain run`. Nothing of it outlives the test."""

    def __init__(self, folder: Path, command: Sequence[str], **streams: Any) -> None:
        """streams: those of the process that are not to be files of this folder, as `subprocess.Popen` takes them."""
        self.folder = folder
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            given = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr} | streams
            self.process = subprocess.Popen(command, cwd=folder, **given)
        self._seen: set[psutil.Process] = set()

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    def wait(self) -> int:
        try:
            return self.process.wait(GENEROUS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end\n{self.stderr}") from None

    def until(self, condition: Callable[[], Any], what: str, *, pause: float = 0.02) -> Any:
        """The condition's first answer that is true."""
        deadline = time.monotonic() + GENEROUS
        while not (answer := condition()):
            assert self.process.poll() is None, f"the run ended before: {what}\n{self.stderr}"
            assert time.monotonic() < deadline, f"not within {GENEROUS} s: {what}\n{self.stderr}"
            time.sleep(pause)
        return answer

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def status(self) -> dict[str, Any]:
        """The status printed at the end."""
        return dict(yaml.safe_load(self.stdout)["status"])

    @property
    def seen_status(self) -> dict[str, Any]:
        """The status that is written while the run goes on, and at its end."""
        (path,) = self.folder.glob("disttrain-runs/*/status.yaml")
        return dict(yaml.safe_load(path.read_text())["status"])

    @property
    def metrics(self) -> str:
        """Text of metrics.jsonl; none before it is there."""
        return "".join(path.read_text() for path in self.folder.glob("disttrain-runs/*/metrics/metrics.jsonl"))

    @property
    def home(self) -> Path:
        """The folder of the run."""
        (path,) = (path.parent for path in (self.folder / "disttrain-runs").glob("*/status.yaml"))
        return path

    def condition(self, type_: str) -> dict[str, Any]:
        return next(entry for entry in self.status["conditions"] if entry["type"] == type_)

    def log(self, worker: int, attempt: int) -> str:
        paths = list(self.home.glob(f"logs/*-worker-{worker}-a{attempt}.log"))
        return paths[0].read_text() if paths else ""

    def below(self) -> list[psutil.Process]:
        """All processes below the runner; remembered for the clean-up."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen.update(found)
        return found

    def find(self, name: str) -> psutil.Process | None:
        """The process below the runner that `ps` shows as this: keeper, agent, rank N."""
        for process in self.below():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    return process
        return None

    def left(self) -> list[psutil.Process]:
        """Processes of this run that still run."""
        return [process for process in self._seen if runs(process)]

    def clean_up(self) -> None:
        self.below()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.left():
            process.kill()


class Workplace:
    """A folder with manifests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: list[Run] = []

    def beside(self, name: str) -> "Workplace":
        """Another folder, of whose runs nothing outlives this one's test either."""
        other = Workplace(self.folder / name)
        other.folder.mkdir()
        other._runs = self._runs
        return other

    def write(self, name: str = "digits", **spec: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(a_manifest(name, **spec)))
        return path

    def start(self, *arguments: str | Path, command: Sequence[str] = DISTTRAIN) -> Run:
        return self.execute([*command, "run", *(str(argument) for argument in arguments)])

    def execute(self, command: Sequence[str], **streams: Any) -> Run:
        """A command line that is, or has in it, a `disttrain run`."""
        run = Run(self.folder, command, **streams)
        self._runs.append(run)
        return run

    def run(self, *arguments: str | Path, command: Sequence[str] = DISTTRAIN) -> Run:
        run = self.start(*arguments, command=command)
        run.wait()
        return run

    def clean_up(self) -> None:
        for run in self._runs:
            run.clean_up()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    # Two cores, many ranks: threads of torch would only wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    workplace = Workplace(tmp_path)
    yield workplace
    workplace.clean_up()


def command(*words: str, env: list[dict[str, Any]] | None = None, **container: Any) -> dict[str, Any]:
    """A template whose container runs these words."""
    whole = {"name": "trainer", "image": "unused", "command": list(words), "env": env or [], **container}
    return {"spec": {"containers": [whole]}}


def own(workplace: Workplace, *words: str, replicas: int = 1, name: str = "own", **spec: Any) -> Path:
    workers = {
        "replicas": replicas,
        **spec.pop("workers", {}),
        "template": command(*words, **spec.pop("container", {})),
    }
    return workplace.write(name, training=None, workers=workers, **spec)


def held_digits(workplace: Workplace, *, samples: int, attempts: int = 1) -> dict[str, Any]:
    """Data and model of a training whose first attempts hold each rank after so many samples, until it is stopped."""
    shutil.copy(Path(__file__).with_name("held_data.py"), workplace.folder)
    config = {"samples": samples, "attempts": attempts}
    return {
        "data": {"name": None, "entrypoint": "held_data:digits", "config": config},
        "model": {"name": "mlp", "config": {"inputSize": 64, "outputSize": 10}},
    }


def script(workplace: Workplace, text: str, name: str = "program.py") -> str:
    """Path of a program with this text."""
    path = workplace.folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)
