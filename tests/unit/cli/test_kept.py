"""Pods forked from the fork server: they behave as programs of their own do."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from disttrain.local import kept
from disttrain.local.kept import KILL, TERMINATE, ForkServer, Kept, execute, modules_of
from disttrain.local.launch import Launch
from disttrain_api.names import Env, ExitCode
from tests.builders import a_job
from tests.waiting import GENEROUS

LIGHT = ("json",)
"""Modules that take no time to import."""
POD = {
    Env.WORLD_SIZE: "1",
    Env.LOCAL_WORLD_SIZE: "1",
    Env.NODE_RANK: "0",
    Env.MASTER_ADDR: "no-such-host.invalid",
    Env.MASTER_PORT: "29500",
}


class Runner:
    """The runner's part: pods in one folder, of one fork server."""

    def __init__(self, folder: Path, modules: tuple[str, ...]) -> None:
        self.folder, self.fork_server = folder, ForkServer(modules)
        (folder / "job.json").write_text("{}")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def start(self, *command: str, **environment: str) -> Kept:
        variables = {Env.CONFIG: str(self.folder / "job.json"), Env.TERMINATION_LOG: str(self.folder / "last-words")}
        arguments = command or (sys.executable, "-P", "-m", "disttrain_agent")
        # Where the fork server finds modules of a test: not in its working folder.
        variables["PYTHONPATH"] = str(self.folder)
        launch = Launch(arguments, {**os.environ, **POD, **variables, **environment}, self.folder)
        return await self.fork_server.start(launch, self.folder / "log")

    async def start_waiting(self) -> Kept:
        """A pod whose agent waits for the master's address."""
        pod = await self.start()
        await self.until_logged("waiting for the address")
        return pod

    async def until_logged(self, text: str) -> None:
        async with asyncio.timeout(GENEROUS):
            # What other processes write rings no bell here.
            while not (self.folder / "log").exists() or text not in self.log:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def processes(self, name: str) -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if name_of(process) == name]

    def is_forked(self) -> bool:
        return bool(self.processes("keeper"))


def name_of(process: psutil.Process) -> str | None:
    """Its name; None once it has ended, which it may do while it is asked."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return None


Runners = Callable[..., Runner]


@pytest.fixture
async def runners(tmp_path: Path) -> AsyncIterator[Runners]:
    """Makes runners whose nurseries import these modules, and sees that nothing of them is left."""
    before, made = set(psutil.Process().children()), []

    def make(*modules: str) -> Runner:
        made.append(Runner(tmp_path, modules))
        return made[-1]

    yield make
    for runner in made:
        await runner.fork_server.close()
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def runner(runners: Runners) -> Runner:
    return runners(*LIGHT)


async def test_a_pod_ends_with_its_own_exit_code_and_log(runner: Runner, tmp_path: Path) -> None:
    pod = await runner.start(**{Env.WORLD_SIZE: "none"})
    assert await pod.wait() == ExitCode.INVALID_CONFIGURATION
    assert "WORLD_SIZE must be an integer of at least 1, not 'none'" in runner.log
    assert "InvalidConfiguration" in (tmp_path / "last-words").read_text()


async def test_files_in_the_working_folder_hide_no_module(runner: Runner, tmp_path: Path) -> None:
    for name in ("json", "asyncio", "yaml", "socket", "random", "disttrain", "disttrain_agent"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user's file')")
    pod = await runner.start(PYTHONPATH="")
    await runner.until_logged("waiting for the address")
    assert runner.is_forked()
    pod.order(TERMINATE)
    assert await pod.wait() == ExitCode.STOPPED


async def test_sigterm_is_passed_on_to_a_forked_pod(runner: Runner) -> None:
    pod = await runner.start_waiting()
    assert runner.is_forked()
    pod.order(TERMINATE)
    assert await pod.wait() == ExitCode.STOPPED
    assert "SIGTERM: stopping" in runner.log


async def test_a_forked_pod_is_killed_with_all_it_has_started(runner: Runner) -> None:
    pod = await runner.start_waiting()
    below = runner.processes("agent")
    pod.order(KILL)
    assert await pod.wait() == 137
    assert below
    assert not any(process.is_running() for process in below)


async def test_a_killed_keeper_is_a_killed_pod(runner: Runner) -> None:
    pod = await runner.start_waiting()
    (agent,) = runner.processes("agent")
    runner.processes("keeper")[0].kill()
    assert await pod.wait() == 137
    psutil.wait_procs([agent], GENEROUS)
    assert not agent.is_running()


async def test_pods_outlive_the_fork_server_that_they_come_from(runner: Runner) -> None:
    pod = await runner.start_waiting()
    runner.fork_server.abandon()
    later = await runner.start(**{Env.WORLD_SIZE: "none"})
    assert await later.wait() == ExitCode.INVALID_CONFIGURATION
    pod.order(TERMINATE)
    assert await pod.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(("orders", "code"), [(TERMINATE, ExitCode.STOPPED), (KILL, 137), (TERMINATE + KILL, 137)])
async def test_a_pod_that_waits_for_imports_stops(runners: Runners, tmp_path: Path, orders: bytes, code: int) -> None:
    (tmp_path / "never_imported.py").write_text("import threading\nthreading.Event().wait()\n")
    runner = runners("never_imported")
    pod, other = await runner.start(), await runner.start(**{Env.WORLD_SIZE: "none"})
    ends = asyncio.gather(pod.wait(), other.wait())
    for letter in orders:
        pod.order(bytes([letter]))
    assert await ends == [code, ExitCode.INVALID_CONFIGURATION], "the other one goes on, as a program of its own"


# As torch does, which notes it in forks alone.
MET = """
import os, torch
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


@pytest.mark.parametrize("content", ["import os\nos._exit(1)\n", MET], ids=["it dies", "it has met the GPU's driver"])
async def test_where_the_fork_server_cannot_fork_pods_are_programs_of_their_own(runners, tmp_path, content):
    (tmp_path / "deadly.py").write_text(content)
    runner = runners("deadly")
    pod = await runner.start()
    ends = asyncio.ensure_future(pod.wait())
    await runner.until_logged("waiting for the address")
    assert not runner.is_forked()
    pod.order(TERMINATE)
    assert await ends == ExitCode.STOPPED


async def test_orders_reach_a_pod_that_is_being_started_as_a_program(runners, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(1)\n")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(launch: Launch, log: Path) -> Kept:
        begun.set()
        await go_on.wait()
        return await execute(launch, log)

    monkeypatch.setattr(kept, "execute", slowly)
    runner = runners("deadly")
    pod = await runner.start()
    ends = asyncio.ensure_future(pod.wait())
    await asyncio.wait_for(begun.wait(), GENEROUS)
    pod.order(KILL)
    go_on.set()
    assert await asyncio.wait_for(ends, GENEROUS) == 137


async def test_what_cannot_be_imported_is_left_to_the_ranks(runners: Runners, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such luck')\n")
    runner = runners("no_such_module", "broken")
    pod = await runner.start_waiting()
    assert runner.is_forked()
    pod.order(TERMINATE)
    await pod.wait()


@pytest.mark.parametrize(
    ("modules", "command", "environment"),
    [
        (LIGHT, (sys.executable, "-c", "print('own')"), {}),
        (LIGHT, (sys.executable, "-m", "timeit", "-n1", "print('own')"), {}),
        ((), (sys.executable, "-P", "-m", "disttrain_agent"), {Env.WORLD_SIZE: "own"}),
        (LIGHT, (sys.executable, "-P", "-m", "disttrain_agent"), {Env.WORLD_SIZE: "own", "LD_BIND_NOW": "1"}),
    ],
    ids=["own command", "own module", "no modules", "another environment"],
)
async def test_what_a_fork_would_not_be_like_is_a_program_of_its_own(runners, modules, command, environment):
    runner = runners(*modules)
    first = await runner.start_waiting()
    keepers = len(runner.processes("keeper"))
    pod = await runner.start(*command, **environment)
    assert len(runner.processes("keeper")) == keepers
    await pod.wait()
    assert "own" in runner.log
    first.order(TERMINATE)
    await first.wait()


def test_the_fork_server_imports_what_the_ranks_will() -> None:
    digits = a_job(training={"model": {"name": "resnet"}, "data": {"name": "digits"}}).spec
    assert digits is not None
    trainer = "disttrain_trainer"
    assert modules_of(digits) == (f"{trainer}.program", f"{trainer}.data.digits", f"{trainer}.models.resnet.model")
    users = a_job(
        training={"model": {"name": None, "entrypoint": "my:m"}, "data": {"name": None, "entrypoint": "my:d"}}
    ).spec
    assert users is not None
    assert modules_of(users) == (f"{trainer}.program",)
    own = a_job(training=None).spec
    assert own is not None
    assert modules_of(own) == ()
