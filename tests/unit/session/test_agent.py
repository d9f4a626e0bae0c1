"""The agent beside a program of the user's own that reports: it answers for the ranks, and changes nothing else."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from disttrain_agent.environment import stacks_file
from disttrain_agent.own_ranks import OwnRanks, introduce, process_file
from disttrain_agent.reports import report_path
from disttrain_agent.step_clock import StepClock
from disttrain_api.agent_token import agent_token
from disttrain_api.names import CHECKPOINT_PATH, TOKEN_HEADER, Env
from disttrain_api.report import AgentStatus, RankPhase, RankReport
from disttrain_session.asked import LOG
from disttrain_session.place import place_of, pod_of
from disttrain_session.progress import SessionProgress
from disttrain_session.reported_values import checked
from tests.waiting import GENEROUS, until
from tools.cluster.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, real-time signals")

WAIT = """
import os, pathlib, sys, time

def where_it_waits(name):
    pathlib.Path(f"at-{name}").touch()
    while not os.path.exists(name):
        time.sleep(0.01)

"""
REPORTING = f"""{WAIT}
import disttrain

disttrain.report(step=4, total=9, loss=2.5)
where_it_waits("go")
disttrain.report(step=9, total=9)
print("the program's own line", flush=True)
sys.exit(7)
"""
SESSION = f"""{WAIT}
import torch
import disttrain

with disttrain.session(steps=40, checkpoint_interval=100) as session:
    model, optimizer = session.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    session.restore(model=model, optimizer=optimizer)
    while not session.finished:
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        session.step(loss=1.0)
        if session.completed in (20, 30):
            where_it_waits(f"go-{{session.completed}}")
"""


class Program:
    """A process that runs as the only rank of a pod of a job with a command of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "token").write_text("a-token")
        self.environment = os.environ | {
            Env.JOB_UID: "3f9a1c02-0000",
            Env.JOB_NAME: "own",
            Env.ROLE: "worker",
            Env.SCRATCH: str(folder),
            Env.STORAGE: str(folder / "storage"),
            Env.TERMINATION_LOG: str(folder / "termination-log"),
            Env.ATTEMPT: "2",
            Env.NODE_RANK: "0",
            Env.LOCAL_WORLD_SIZE: "1",
            Env.PET_MASTER_ADDR: "127.0.0.1",
            # As torchrun says to the ranks of `--standalone`.
            Env.MASTER_ADDR: "worker-0.example.com",
            Env.AGENT_PORT: str(self.port),
            Env.TOKEN: str(folder / "token"),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, text: str) -> "Program":
        (self.folder / "storage").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return self

    def reaches(self, name: str) -> None:
        """Wait until the program waits for the file `name`."""
        assert self.process is not None
        process = self.process
        until(lambda: (self.folder / f"at-{name}").exists() or process.poll() is not None, f"it waits for {name}")
        assert process.poll() is None, process.communicate()

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the agent answers; None while none does."""
        headers = {TOKEN_HEADER: agent_token("a-token")}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=GENEROUS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())
        except OSError:
            return None

    def status(self) -> AgentStatus | None:
        found = self.ask("/v1/status")
        return None if found is None else AgentStatus.model_validate(found)

    def until_answered(self) -> AgentStatus:
        until(lambda: self.status() is not None, "its agent answers")
        found = self.status()
        assert found is not None
        return found

    def agent(self) -> psutil.Process:
        assert self.process is not None
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    found = Program(tmp_path)
    yield found
    found.end()


def test_a_program_that_reports_can_be_asked_while_it_runs_and_ends_as_without_an_agent(program: Program) -> None:
    program.start(REPORTING).reaches("go")
    found = program.until_answered()
    (rank,) = found.ranks
    assert program.process is not None
    assert (found.job_uid, found.attempt, rank.pid, rank.exit_code) == ("3f9a1c02-0000", 2, program.process.pid, None)
    assert (rank.report.step, rank.report.total_steps, rank.report.loss, rank.report.phase) == (4, 9, 2.5, None)
    assert rank.seconds_since_step is not None, "it may hang from here on"
    assert "where_it_waits" in program.ask("/v1/stacks")["stacks"]["0"]
    assert "no session" in program.ask(CHECKPOINT_PATH, "POST")["error"]
    agent = program.agent()
    assert os.getsid(agent.pid) == agent.pid, "signals for the program's group are not for it"
    said = {Path(f"/proc/{agent.pid}/fd/{number}").readlink() for number in (1, 2)}
    assert said == {program.folder / "reports" / LOG}, "the program's outputs are the program's"
    (program.folder / "go").touch()
    out, err = program.process.communicate(timeout=GENEROUS)
    assert (program.process.returncode, out, err) == (7, b"the program's own line\n", b"")
    until(lambda: not agent.is_running(), "the agent ends with the program")


def test_the_ranks_of_torchrun_standalone_can_be_asked_from_outside(program: Program) -> None:
    there = program.environment | {Env.PET_MASTER_ADDR: "worker-0.example.com", Env.MASTER_ADDR: "localhost"}
    place = place_of(there)
    assert place is not None
    assert not pod_of(place, there).on_loopback


def test_the_agent_of_a_program_that_is_killed_ends_and_makes_room_for_the_next_ones(program: Program) -> None:
    program.start(REPORTING).reaches("go")
    program.until_answered()
    agent, process = program.agent(), program.process
    assert process is not None
    os.kill(agent.pid, signal.SIGSTOP)
    program.end()
    (program.folder / "at-go").unlink()
    # As torchrun does, which starts its ranks again: the port is still the former agent's.
    program.start(REPORTING).reaches("go")
    said = program.folder / "reports" / LOG
    until(lambda: "cannot listen" in said.read_text(), "it has found its port taken")
    os.kill(agent.pid, signal.SIGCONT)
    until(lambda: not agent.is_running(), "the former agent ends")
    (rank,) = program.until_answered().ranks
    assert program.process is not None
    assert rank.pid == program.process.pid != process.pid


def test_a_session_says_where_it_is_and_writes_a_checkpoint_when_it_is_asked_for_one_and_no_other(
    program: Program,
) -> None:
    program.start(SESSION).reaches("go-20")
    found = program.until_answered()
    (rank,) = found.ranks
    assert (rank.report.phase, rank.report.total_steps) == ("Training", 40)
    assert rank.pace is not None
    assert 0 < rank.pace.median_seconds <= rank.pace.longest_seconds
    until(lambda: program.status().ranks[0].pace.still_seconds > 0.2, "the time without a step grows")
    assert "where_it_waits" in program.ask("/v1/stacks?thread=main")["stacks"]["0"]
    kept = program.folder / "storage" / "own-3f9a1"
    assert not list(kept.glob("step-*"))
    assert program.ask(CHECKPOINT_PATH, "POST") == {"requested": True}
    (program.folder / "go-20").touch()
    program.reaches("go-30")
    # The ranks are asked before the last update of a step, so that one may be done already.
    (written,) = kept.glob("step-*")
    assert written.name in ("step-21", "step-22")
    until(lambda: program.status().ranks[0].report.checkpoint is not None, "the agent knows it")
    assert program.status().ranks[0].report.phase == "Training", "it goes on"


def test_no_signal_is_sent_to_a_process_that_has_the_number_of_a_rank_and_is_another(tmp_path: Path) -> None:
    introduce(tmp_path, 3)
    ranks = OwnRanks(tmp_path, [2, 3])
    (found,) = ranks.ranks
    assert (found.rank, found.pid, found.alive) == (3, os.getpid(), True)
    process_file(tmp_path, 3).write_text(f"{os.getpid()} 1")
    assert ranks.ranks == []
    for garbage in ("", "x 1", "1 1", f"{os.getpid()}"):
        process_file(tmp_path, 3).write_text(garbage)
        assert ranks.ranks == []


def test_a_rank_may_be_the_first_process_of_its_container(tmp_path: Path) -> None:
    started = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    process_file(tmp_path, 0).write_text(f"1 {started}")
    assert [one.pid for one in OwnRanks(tmp_path, [0]).ranks] == [1]


def test_a_rank_that_starts_again_is_asked_for_no_stacks_before_it_expects_the_signal(tmp_path: Path) -> None:
    stacks_file(tmp_path, 0).write_text("of the former process")
    introduce(tmp_path, 0)
    assert not stacks_file(tmp_path, 0).exists()


def test_while_a_session_saves_it_takes_no_steps(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in program.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(Env.AGENT_PORT)
    progress, reports = SessionProgress(100), program.folder / "reports"
    clock = StepClock(reports, [0])

    def phase() -> str | None:
        return RankReport.model_validate_json(report_path(reports, 0).read_bytes()).phase

    progress.restores()
    assert phase() == RankPhase.RESTORING
    progress.resumed(0, None)
    for step in range(1, 20):
        progress.step(checked(step, 100, 1.0, None, {}))
    assert (phase(), clock.pace(0) is not None) == (RankPhase.TRAINING, True)
    with progress.saving():
        assert (phase(), clock.pace(0)) == (RankPhase.SAVING, None)
    assert (phase(), clock.pace(0) is not None) == (RankPhase.TRAINING, True)
    progress.ended()
    assert clock.pace(0) is None
