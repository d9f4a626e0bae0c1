"""A terminal, a pipe or a disk that is gone changes nothing of what happens to the job."""

import contextlib
import os
import pty
import re
import shlex
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import a_claim_template

from .conftest import DISTTRAIN, Run, Workplace

# Nothing is saved unless the job is stopped, and nobody waits for the last step.
ENDLESS = {"steps": 1_000_000, "microBatchSize": 16, "checkpoint": {"interval": 1_000_000}}
STORED = a_claim_template()


def endless(workplace: Workplace) -> Path:
    return workplace.write(workers={"replicas": 2}, training=ENDLESS, storage=STORED)


def shell(line: str) -> list[str]:
    """A shell that runs this line, in which `$RUN` is `disttrain run`."""
    return ["bash", "-c", line.replace("$RUN", f"{shlex.join(DISTTRAIN)} run")]


def until_it_trains(run: Run) -> None:
    run.until(lambda: re.search(r"\bstep: \d+", _log(run)), "the ranks train")
    run.below()


def _log(run: Run) -> str:
    logs = run.folder.glob("disttrain-runs/*/logs/*-worker-0-a1.log")
    return "".join(path.read_text() for path in logs)


def stored(run: Run) -> dict[str, Any]:
    """The job as its folder has it, whatever could be printed."""
    return dict(yaml.safe_load((run.home / "status.yaml").read_text()))


def suspended_with_a_checkpoint(run: Run) -> None:
    status = stored(run)["status"]
    assert status["phase"] == "Suspended"
    assert status["checkpoint"]["step"] > 0
    assert (run.home / "storage" / run.home.name / f"step-{status['checkpoint']['step']}" / ".metadata").exists()
    assert "its checkpoint is written" in _log(run)
    assert not run.left()


class Terminal:
    """A pseudo terminal, with a person who reads all of it until it is hung up."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self.screen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, workplace: Workplace, command: Sequence[str]) -> Run:
        """The command as the leader of this terminal's session."""
        streams = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        run = workplace.execute(["setsid", "--ctty", *command], **streams)
        os.close(self.slave)
        return run

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def press_ctrl_c(self) -> None:
        """SIGINT to all processes in the foreground."""
        self.type(b"\x03")

    def hang_up(self) -> None:
        # A descriptor that is being read stays open until the read returns, so the reader goes first.
        os.close(os.dup2(os.open(os.devnull, os.O_RDONLY), self._master))

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 4096):
                self.screen += data


def test_ctrl_c_on_a_pipeline_suspends_although_its_reader_dies_of_it(workplace: Workplace) -> None:
    path = endless(workplace)
    terminal = Terminal()
    # The shell waits for the runner's code although SIGINT ends `tee`, and with it the pipeline, first.
    run = terminal.start(workplace, shell(f"trap : INT; {{ trap : INT; $RUN {path}; echo $? > code; }} 2>&1 | tee log"))
    until_it_trains(run)
    terminal.press_ctrl_c()
    run.wait()
    assert (workplace.folder / "code").read_text() == "130\n"
    suspended_with_a_checkpoint(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_reader_that_is_gone_changes_nothing(workplace: Workplace, number: signal.Signals) -> None:
    reader, writer = os.pipe()
    run = workplace.execute([*DISTTRAIN, "run", str(endless(workplace))], stdout=writer, stderr=writer)
    os.close(writer)
    until_it_trains(run)
    os.close(reader)
    run.signal(number)
    assert run.wait() == 128 + number
    suspended_with_a_checkpoint(run)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_from_the_start_change_nothing(workplace: Workplace, closed: str) -> None:
    run = workplace.execute(shell(f"exec $RUN {endless(workplace)} {closed}"))
    until_it_trains(run)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    suspended_with_a_checkpoint(run)
    # What is written to no stream is written to no file that has got its number, either.
    assert stored(run)["kind"] == "DistTrainingJob"
    assert "digits:" not in "".join(path.read_text() for path in run.home.glob("logs/*"))


def test_a_terminal_that_is_hung_up_suspends(workplace: Workplace) -> None:
    terminal = Terminal()
    run = terminal.start(workplace, [*DISTTRAIN, "run", str(endless(workplace))])
    until_it_trains(run)
    terminal.hang_up()
    assert run.wait() == 129
    suspended_with_a_checkpoint(run)


def test_with_nohup_the_job_outlives_its_terminal(workplace: Workplace) -> None:
    (workplace.folder / "wait.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"
    )
    template = {"spec": {"containers": [{"name": "trainer", "image": "unused", "command": ["python", "wait.py"]}]}}
    path = workplace.write(training=None, workers={"replicas": 1, "template": template})
    terminal = Terminal()
    run = terminal.start(workplace, ["nohup", *DISTTRAIN, "run", str(path)])
    run.until(lambda: len(run.below()) == 2, "the program runs")
    terminal.hang_up()
    # Sent and ignored before the program may end: signals come in the order of their system calls.
    run.signal(signal.SIGHUP)
    (workplace.folder / "go").touch()
    assert run.wait() == 0
    assert stored(run)["status"]["phase"] == "Succeeded"


def test_a_status_that_cannot_be_printed_is_in_its_file(workplace: Workplace) -> None:
    path = workplace.write(workers={"replicas": 1}, training={"steps": 20, "microBatchSize": 16})
    with Path("/dev/full").open("wb") as full:
        run = workplace.execute([*DISTTRAIN, "run", str(path)], stdout=full)
        assert run.wait() == 0
    assert run.stderr.splitlines()[-1] == (
        "disttrain: the status is in "
        f"disttrain-runs/{run.home.name}/status.yaml alone: "
        "cannot write to standard output: No space left on device"
    )
