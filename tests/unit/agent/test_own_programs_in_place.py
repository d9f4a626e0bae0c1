"""Commands of the user's own that start again in their pods, below agents as the operator puts them there."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disttrain_agent.gang import master_ports
from disttrain_api.names import RESTARTED_MASTER_PORTS, Env, ExitCode
from disttrain_operator.plan.agent_around import AGENT_AROUND

from .conftest import Pod
from .test_gang_agents import gangs_of, rank_of
from .test_http_api import a_port
from .test_restarts_in_place import restarts

Gangs = Callable[..., list["OwnPod"]]
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(os.environ["DISTTRAIN_SCRATCH"]).parent
rank = int(os.environ["NODE_RANK"])

def note(name, text=""):
    (folder / f"{name}.{rank}").write_text(str(text))

def ready():
    (folder / f"ready-{rank}").touch()

def wait(pattern):
    while not list(folder.glob(pattern)):
        time.sleep(0.01)

number = len(list(folder.glob("life-*"))) + 1
note(f"life-{number}", os.getpid())
variables = "MASTER_PORT PET_MASTER_PORT PET_RDZV_ID DISTTRAIN_GENERATION DISTTRAIN_AGENT_PORT RANK".split()
note(f"env-{number}", json.dumps({name: os.environ.get(name) for name in variables}))
"""
FIRST_LIFE_HOLDS = "if number == 1: ready(), signal.pause()\n"


class OwnPod(Pod):
    """A pod whose agent stands before a command of the user's own."""

    python = (sys.executable,)

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in super().environment.items() if name != Env.CONFIG}
        return own | {Env.TOKEN: str(self.folder / "token"), Env.PET_MASTER_PORT: "29500", Env.PET_RDZV_ID: "uid-1-1"}

    def start(self, rank_program: str) -> "Pod":
        (self.folder / "program.py").write_text(PRELUDE + rank_program)
        return self.start_command([sys.executable, str(self.folder / "program.py")])

    def start_command(self, command: list[str]) -> "Pod":
        words = [*self.python, *AGENT_AROUND[1:], *command]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        return self

    def variables(self, life: int) -> dict[str, Any]:
        (text,) = self.seen(f"env-{life}").values()
        return dict(json.loads(text))


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    yield from gangs_of(OwnPod, tmp_path)


def start(pods: list[OwnPod], program: str) -> None:
    """Start all pods; returns when their programs run and the agents are connected."""
    for pod in pods:
        pod.start(program)
    for pod in pods:
        pod.until(lambda pod=pod: bool(list(pod.folder.glob("ready-*"))), "the program is ready")
    if len(pods) > 1:
        pods[0].until(lambda: f"all {len(pods)} workers are connected" in pods[0].log, "all agents take part")


def test_a_killed_program_starts_again_in_its_pod_with_another_port_to_meet(gangs: Gangs) -> None:
    (pod,) = gangs(1, ranks=2, **{Env.AGENT_PORT: str(a_port())})
    start([pod], f"{FIRST_LIFE_HOLDS}print('as it is\\r\\n\\x1b[1mand no end', end='', flush=True)")
    os.kill(rank_of(pod), signal.SIGKILL)
    assert pod.wait() == 0, pod.log
    assert "\nas it is\r\n\x1b[1mand no end" in (pod.folder / "log").read_bytes().decode()
    first, second = pod.variables(1), pod.variables(2)
    assert (first["MASTER_PORT"], first["PET_RDZV_ID"], first[Env.GENERATION]) == ("29500", "uid-1-1", "0")
    assert int(second["MASTER_PORT"]) in RESTARTED_MASTER_PORTS
    assert second["PET_MASTER_PORT"] == second["MASTER_PORT"]
    assert (second["PET_RDZV_ID"], second[Env.GENERATION]) == ("uid-1-1-1", "1")
    assert (first["RANK"], first[Env.AGENT_PORT]) == (None, None)
    found = restarts(pod)
    assert (found.count, found.failure.rank, found.failure.signal) == (1, 0, 9)
    assert pod.report.failure is None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_program_restarts_those_of_all_pods_which_meet_on_one_port(gangs: Gangs, victim: int) -> None:
    pods = gangs(2)
    start(pods, FIRST_LIFE_HOLDS)
    os.kill(rank_of(pods[victim]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    first, second = (pod.variables(2) for pod in pods)
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "29500"
    assert restarts(pods[0]).failure.rank == victim


def test_a_pod_in_place_of_a_lost_one_meets_the_others_on_their_port(gangs: Gangs) -> None:
    first, gone = pods = gangs(2)
    start(pods, FIRST_LIFE_HOLDS)
    assert gone.process is not None
    gone.process.kill()
    folder = gone.folder.with_name("new")
    folder.mkdir()
    (folder / "token").write_text("a token of the job")
    new = OwnPod(folder, changes={**gone.changes, Env.REPLACEMENT: "1"})
    try:
        new.start("")
        assert [first.wait(), new.wait()] == [0, 0], first.log + new.log
    finally:
        new.end()
    assert new.variables(1) == first.variables(2)
    assert new.variables(1)["MASTER_PORT"] != "29500"
    assert new.variables(1)[Env.GENERATION] == "1"


LAUNCHER = """
ranks = []
for local in range(2):
    # As torchrun does: each in a session of its own. They outlive a launcher that is killed, and wait out a SIGTERM.
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    code += f"open(os.path.join({str(folder)!r}, f'child-{number}-{local}'), 'w').write(str(os.getpid()));"
    code += "time.sleep(1000)" if number == 1 else "0"
    ranks.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
if number == 1:
    wait("child-1-0"), wait("child-1-1"), ready(), ranks[0].wait()
former = [int(path.read_text()) for path in [*folder.parent.glob("*/life-1.*"), *folder.parent.glob("*/child-1-*")]]
note("alive", [pid for pid in former if os.path.exists(f"/proc/{pid}")])
note("former", len(former))
sys.exit(max(child.wait() for child in ranks))
"""


def test_no_launcher_starts_again_before_no_child_of_any_is_left(gangs: Gangs) -> None:
    pods = gangs(2, ranks=2)
    start(pods, LAUNCHER)
    os.kill(rank_of(pods[0]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    for pod in pods:
        assert (*pod.seen("alive").values(), *pod.seen("former").values()) == ("[]", "6")


def test_a_program_that_fails_while_all_start_again_is_another_restart(gangs: Gangs) -> None:
    pods = gangs(2)
    program = f"{FIRST_LIFE_HOLDS}if number == 2: sys.exit(7) if rank == 1 else signal.pause()\n"
    start(pods, program)
    os.kill(rank_of(pods[0]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert (restarts(pods[0]).count, restarts(pods[0]).failure.exit_code) == (2, 7)
    ports = [[pod.variables(life)["MASTER_PORT"] for pod in pods] for life in (1, 2, 3)]
    assert all(first == second for first, second in ports)
    assert len({first for first, _ in ports}) == 3


def test_restarts_without_a_new_checkpoint_are_used_up_and_a_new_one_renews_them(gangs: Gangs) -> None:
    (pod,) = gangs(1, ranks=2, **{Env.RESTARTS_IN_PLACE: "1"})
    program = """
checkpoint = {"step": min(number, 2), "path": "/c", "time": "2026-01-01T12:00:00Z"}
report = {"rank": 1, "step": number, "totalSteps": 9, "checkpoint": checkpoint}
reports = folder / "scratch" / "reports"
(reports / "part").write_text(json.dumps(report))
(reports / "part").rename(reports / "rank-1.json")
sys.exit(10 + number)
"""
    assert pod.start(program).wait() == 13, pod.log
    assert (restarts(pod).count, restarts(pod).failure.exit_code, pod.failure.exit_code) == (2, 12, 13)
    assert pod.progress.step == 3


def test_a_program_whose_lines_are_read_starts_again_below_what_reads_them(gangs: Gangs) -> None:
    rules = {"totalSteps": 9, "logRules": [{"pattern": r"iter (?P<step>\d+)"}]}
    (pod,) = gangs(1, **{Env.PROGRESS: json.dumps(rules)})
    program = pod.folder / "program.py"
    program.write_text(f"{PRELUDE}print(f'iter {{number + 3}}', flush=True)\n{FIRST_LIFE_HOLDS}")
    pod.start_command([sys.executable, "-P", "-m", "disttrain_session.program", sys.executable, str(program)])
    pod.until((pod.folder / "ready-0").exists, "the program is ready")
    os.kill(rank_of(pod), signal.SIGKILL)
    assert pod.wait() == 0, pod.log
    assert (pod.progress.step, restarts(pod).failure.signal) == (5, 9)


def test_a_number_that_means_something_to_the_trainer_alone_is_no_reason_to_give_up(gangs: Gangs) -> None:
    (pod,) = gangs(1)
    assert pod.start(f"sys.exit({ExitCode.CHECKPOINT_MISMATCH:d} if number == 1 else 0)").wait() == 0, pod.log
    assert restarts(pod).failure.exit_code == 1
    assert f"the command exited with code {ExitCode.CHECKPOINT_MISMATCH:d}" in pod.log


def test_a_command_that_is_not_there_ends_the_pod_as_a_shell_does(gangs: Gangs) -> None:
    (pod,) = gangs(1)
    assert pod.start_command(["no-such-program"]).wait() == 127
    assert "cannot start the ranks: No such file or directory no-such-program" in pod.log


class TestWithoutAnAgentInTheImage:
    @pytest.fixture(autouse=True)
    def no_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(OwnPod, "python", (sys.executable, "-S"))

    def test_the_command_is_the_pods_process_and_fails_as_without_the_setting(self, gangs: Gangs) -> None:
        (pod,) = gangs(1)
        pod.start("note('parent', os.getpid()), sys.exit(7)")
        assert pod.process is not None
        assert pod.wait() == 7
        assert pod.seen("parent") == {0: str(pod.process.pid)}
        assert "[agent] no restart in place: its image has no agent" in pod.log
        assert not (pod.folder / "termination-log").exists()

    def test_a_pod_in_place_of_a_lost_one_starts_nothing(self, gangs: Gangs) -> None:
        (pod,) = gangs(1, **{Env.REPLACEMENT: "1"})
        assert pod.start("pass").wait() == ExitCode.PEER_LOST
        assert not pod.seen("life-1")
        assert (pod.failure.exit_code, pod.failure.reason) == (ExitCode.PEER_LOST, "PeerLost")


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as kept, socket.create_server(("127.0.0.1", 0)) as freed:
        port = freed.getsockname()[1]
        monkeypatch.setattr(master_ports, "RESTARTED_MASTER_PORTS", [kept.getsockname()[1], port])
        found = master_ports.free_ports()
        assert next(found) == 0, "all meet where they met before"
        freed.close()
        assert [next(found), next(found)] == [port, port]


def test_no_port_comes_twice_while_there_are_others() -> None:
    found = master_ports.free_ports()
    assert len({next(found) for _ in range(50)}) == 50
