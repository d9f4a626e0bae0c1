"""Pods forked from the nursery: they behave as programs of their own do."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from disttrain.local import kept
from disttrain.local.kept import KILL, TERMINATE, Kept, Nursery, execute, modules_of
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
    """The runner's part: pods in one folder, of one nursery."""

    def __init__(self, folder: Path, modules: tuple[str, ...] = LIGHT) -> None:
        self.folder, self.nursery = folder, Nursery(modules)
        (folder / "job.json").write_text("{}")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def start(self, *command: str, **environment: str) -> Kept:
        ours = {Env.CONFIG: str(self.folder / "job.json"), Env.TERMINATION_LOG: str(self.folder / "last-words")}
        words = command or (sys.executable, "-P", "-m", "disttrain_agent")
        # Where the nursery finds modules of a test: not in its working folder.
        ours["PYTHONPATH"] = str(self.folder)
        launch = Launch(words, {**os.environ, **POD, **ours, **environment}, self.folder)
        return await self.nursery.start(launch, self.folder / "log")

    async def until_logged(self, text: str) -> None:
        async with asyncio.timeout(GENEROUS):
            # What other processes write rings no bell here.
            while not (self.folder / "log").exists() or text not in self.log:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def processes(self, name: str) -> list[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE and process.name() == name]


Scenario = Callable[[Runner], Coroutine[Any, Any, None]]


def play(folder: Path, scenario: Scenario, modules: tuple[str, ...] = LIGHT) -> None:
    """Run a scenario, and see that nothing of it is left."""

    async def whole() -> None:
        runner = Runner(folder, modules)
        try:
            await scenario(runner)
        finally:
            await runner.nursery.close()

    before = set(psutil.Process().children())
    asyncio.run(whole())
    assert set(psutil.Process().children()) <= before


def is_forked(runner: Runner) -> bool:
    return bool(runner.processes("keeper"))


def test_a_pod_ends_with_its_own_exit_code_and_log(tmp_path: Path) -> None:
    async def scenario(runner: Runner) -> None:
        pod = await runner.start(**{Env.WORLD_SIZE: "none"})
        assert await pod.wait() == ExitCode.INVALID_CONFIGURATION
        assert "WORLD_SIZE must be an integer of at least 1, not 'none'" in runner.log
        assert "InvalidConfiguration" in (tmp_path / "last-words").read_text()

    play(tmp_path, scenario)


def test_files_in_the_working_folder_hide_no_module(tmp_path: Path) -> None:
    for name in ("json", "asyncio", "yaml", "socket", "random", "disttrain", "disttrain_agent"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user's file')")

    async def scenario(runner: Runner) -> None:
        pod = await runner.start(PYTHONPATH="")
        await runner.until_logged("waiting for the address")
        assert is_forked(runner)
        pod.order(TERMINATE)
        assert await pod.wait() == ExitCode.STOPPED

    play(tmp_path, scenario)


def test_sigterm_is_passed_on_to_a_forked_pod(tmp_path: Path) -> None:
    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        await runner.until_logged("waiting for the address")
        assert is_forked(runner)
        pod.order(TERMINATE)
        assert await pod.wait() == ExitCode.STOPPED
        assert "SIGTERM: stopping" in runner.log

    play(tmp_path, scenario)


def test_a_forked_pod_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        await runner.until_logged("waiting for the address")
        below = runner.processes("agent")
        pod.order(KILL)
        assert await pod.wait() == 137
        assert below
        assert not any(process.is_running() for process in below)

    play(tmp_path, scenario)


def test_a_killed_keeper_is_a_killed_pod(tmp_path: Path) -> None:
    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        await runner.until_logged("waiting for the address")
        (agent,) = runner.processes("agent")
        runner.processes("keeper")[0].kill()
        assert await pod.wait() == 137
        psutil.wait_procs([agent], GENEROUS)
        assert not agent.is_running()

    play(tmp_path, scenario)


def test_pods_outlive_the_nursery_that_they_come_from(tmp_path: Path) -> None:
    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        await runner.until_logged("waiting for the address")
        runner.nursery.abandon()
        later = await runner.start(**{Env.WORLD_SIZE: "none"})
        assert await later.wait() == ExitCode.INVALID_CONFIGURATION
        pod.order(TERMINATE)
        assert await pod.wait() == ExitCode.STOPPED

    play(tmp_path, scenario)


@pytest.mark.parametrize(("orders", "code"), [(TERMINATE, ExitCode.STOPPED), (KILL, 137), (TERMINATE + KILL, 137)])
def test_a_pod_that_waits_for_the_imports_stops_at_once(tmp_path: Path, orders: bytes, code: int) -> None:
    (tmp_path / "never_imported.py").write_text("import threading\nthreading.Event().wait()\n")

    async def scenario(runner: Runner) -> None:
        pod, other = await runner.start(), await runner.start(**{Env.WORLD_SIZE: "none"})
        ends = asyncio.gather(pod.wait(), other.wait())
        for letter in orders:
            pod.order(bytes([letter]))
        assert await ends == [code, ExitCode.INVALID_CONFIGURATION], "the other one goes on, as a program of its own"

    play(tmp_path, scenario, ("never_imported",))


MET = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n"


@pytest.mark.parametrize("content", ["import os\nos._exit(1)\n", MET], ids=["it dies", "it has met the GPU's driver"])
def test_where_the_nursery_cannot_fork_pods_are_programs_of_their_own(tmp_path: Path, content: str) -> None:
    (tmp_path / "deadly.py").write_text(content)

    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        ends = asyncio.ensure_future(pod.wait())
        await runner.until_logged("waiting for the address")
        assert not is_forked(runner)
        pod.order(TERMINATE)
        assert await ends == ExitCode.STOPPED

    play(tmp_path, scenario, ("deadly",))


def test_orders_reach_a_pod_that_is_being_started_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(1)\n")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(launch: Launch, log: Path) -> Kept:
        begun.set()
        await go_on.wait()
        return await execute(launch, log)

    monkeypatch.setattr(kept, "execute", slowly)

    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        ends = asyncio.ensure_future(pod.wait())
        await asyncio.wait_for(begun.wait(), GENEROUS)
        pod.order(KILL)
        go_on.set()
        assert await asyncio.wait_for(ends, GENEROUS) == 137

    play(tmp_path, scenario, ("deadly",))


def test_what_cannot_be_imported_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such luck')\n")

    async def scenario(runner: Runner) -> None:
        pod = await runner.start()
        await runner.until_logged("waiting for the address")
        assert is_forked(runner)
        pod.order(TERMINATE)
        await pod.wait()

    play(tmp_path, scenario, ("no_such_module", "broken"))


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
def test_what_a_fork_would_not_be_like_is_a_program_of_its_own(
    tmp_path: Path, modules: tuple[str, ...], command: tuple[str, ...], environment: dict[str, str]
) -> None:
    async def scenario(runner: Runner) -> None:
        first = await runner.start()
        await runner.until_logged("waiting for the address")
        keepers = len(runner.processes("keeper"))
        pod = await runner.start(*command, **environment)
        assert len(runner.processes("keeper")) == keepers
        await pod.wait()
        assert "own" in runner.log
        first.order(TERMINATE)
        await first.wait()

    play(tmp_path, scenario, modules)


def test_the_nursery_imports_what_the_ranks_will() -> None:
    digits = a_job(training={"model": {"name": "resnet"}, "data": {"name": "digits"}}).spec
    assert digits is not None
    ours = "disttrain_trainer"
    assert modules_of(digits) == (f"{ours}.program", f"{ours}.data.digits", f"{ours}.models.resnet.model")
    users = a_job(
        training={"model": {"name": None, "entrypoint": "my:m"}, "data": {"name": None, "entrypoint": "my:d"}}
    ).spec
    assert users is not None
    assert modules_of(users) == (f"{ours}.program",)
    own = a_job(training=None).spec
    assert own is not None
    assert modules_of(own) == ()
