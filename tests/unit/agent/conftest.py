"""A pod for the agent: its environment, and programs of a few lines as its ranks."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from disttrain_agent.processes import Processes
from disttrain_api.names import Env
from disttrain_api.report import PodReport, RankFailure, RankReport, decode_pod_report
from tests.waiting import GENEROUS, until

AGENT = [sys.executable, "-P", "-m", "disttrain_agent"]


@dataclass
class Pod:
    """Runs the agent as a process. `rank_program` is Python, with `rank`, `report(...)` and `ready()` at hand."""

    folder: Path
    ranks: int = 1
    before: list[str] = field(default_factory=list)
    """Words before the agent's command, for example unshare."""
    changes: dict[str, str | None] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        ours = {
            Env.WORLD_SIZE: str(2 * self.ranks),
            Env.LOCAL_WORLD_SIZE: str(self.ranks),
            Env.NODE_RANK: "1",
            Env.MASTER_ADDR: "127.0.0.1",
            Env.MASTER_PORT: "29500",
            Env.CONFIG: str(self.folder / "job.json"),
            Env.SCRATCH: str(self.folder / "scratch"),
            Env.TERMINATION_LOG: str(self.folder / "termination-log"),
            Env.GRACE_SECONDS: "30",
        }
        merged = {**os.environ, **ours, **self.changes}
        return {key: value for key, value in merged.items() if value is not None}

    def start(self, rank_program: str) -> "Pod":
        program = self.folder / "rank.py"
        program.write_text(PRELUDE + textwrap.dedent(rank_program))
        (self.folder / "job.json").write_text("{}")
        return self.start_command([sys.executable, str(program)])

    def start_command(self, command: list[str]) -> "Pod":
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*self.before, *AGENT, *command], env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def wait(self, seconds: float = GENEROUS) -> int:
        return self.process.wait(seconds)

    def run(self, rank_program: str) -> int:
        return self.start(rank_program).wait()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, lambda: f"{what}\n{self.log}")

    def until_ready(self) -> "Pod":
        self.until(lambda: len(list(self.folder.glob("ready-*"))) == self.ranks, "all ranks are ready")
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Leave nothing running."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def report(self) -> PodReport:
        report = decode_pod_report((self.folder / "termination-log").read_text())
        assert report is not None
        return report

    @property
    def progress(self) -> RankReport:
        assert self.report.progress is not None
        return self.report.progress

    @property
    def failure(self) -> RankFailure:
        assert self.report.failure is not None
        return self.report.failure

    def seen(self, name: str) -> dict[int, str]:
        """What the ranks wrote with `note(name, text)`."""
        return {int(path.suffix[1:]): path.read_text() for path in self.folder.glob(f"{name}.*")}


PRELUDE = f"""
import json, os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["{Env.RANK}"])
folder = pathlib.Path(os.environ["{Env.CONFIG}"]).parent

def note(name, text=""):
    (folder / f"{{name}}.{{rank}}").write_text(str(text))

def ready():
    (folder / f"ready-{{rank}}").touch()

def report(**fields):
    path = pathlib.Path(os.environ["{Env.REPORT_DIR}"]) / f"rank-{{rank}}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({{"rank": rank, **fields}}))
    part.rename(path)

"""


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    pod.end()


@pytest.fixture
def without_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent within the process of the tests adopts and kills nothing that other tests have started."""
    monkeypatch.setattr(Processes, "adopt_orphans", lambda self: None)
    monkeypatch.setattr(Processes, "kill_orphans", lambda self, spared=None: False)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[[int], Pod]]:
    made: list[Pod] = []

    def make(ranks: int, **changes: str | None) -> Pod:
        pod = Pod(tmp_path, ranks=ranks, changes=dict(changes))
        made.append(pod)
        return pod

    yield make
    for pod in made:
        pod.end()


def read_json(text: str) -> dict[str, str]:
    return dict(json.loads(text))
