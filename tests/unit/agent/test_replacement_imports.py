"""What the replacement of a lost pod waits for while its zygote imports, and what that does not hold up."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from disttrain_agent import zygote_process
from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.leader import Leader
from disttrain_agent.life import Timing
from disttrain_agent.reports import TerminationMessage
from disttrain_agent.restart import Limits
from disttrain_agent.supervise import Supervisor
from disttrain_agent.zygote import Zygote
from disttrain_api.names import Env
from tests import waiting
from tests.unit.agent.test_gang_strangers import KILLED, Port, until
from tests.waiting import GENEROUS

READY, ENDS, IMPORTS = "import os; os.write(0, b'r'); os.read(0, 1)", "", "import os; os.read(0, 1)"
FOR_EVER = 10 * GENEROUS


@dataclass
class Replacement:
    """The pod of worker 1 in place of a lost one, as its agent sees it."""

    folder: Path
    supervisor: Supervisor
    zygote: Zygote
    run: asyncio.Task[int]

    @property
    def began(self) -> bool:
        """Whether its rank has started."""
        return (self.folder / "began").exists()

    def end(self) -> None:
        """Leave no process behind, nor one that nobody has waited for."""
        ranks = [rank.pid for rank in self.supervisor._processes.ranks if rank.alive]
        for pid in ranks:
            os.killpg(pid, signal.SIGKILL)
        for pid in (*ranks, self.zygote.pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid or 0, 0)


class Pods:
    """Makes the replacement in a gang of two, whose leader is in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        (folder / "token").write_text("a token of the job")
        self.port = Port(Leader(2, Limits(3, 0), 1.0, FOR_EVER, FOR_EVER), 2)
        self.made: list[Replacement] = []

    def replacement(
        self, program: str, *, imports: float = FOR_EVER, report: float = FOR_EVER, master: str = "127.0.0.1"
    ) -> Replacement:
        """program: of its zygote. imports: seconds that it may take. report: seconds between two looks where nothing
        happens. master: where worker 0 is."""
        self._patch.setattr(zygote_process, "COMMAND", (sys.executable, "-c", program))
        pod = PodEnvironment(
            1, 1, master, self._folder / "job.json", self._folder, 1.0, dict(os.environ), job_uid="uid-1", attempt=1,
            restarts_in_place=Limits(3, 0), workers=2, gang_port=self.port.address[1], replacement=1,
        )  # fmt: skip
        rank = [sys.executable, "-c", f"import time; open({str(self._folder / 'began')!r}, 'w'); time.sleep(999)"]
        zygote, message = Zygote(), TerminationMessage(self._folder / "message")
        supervisor = Supervisor(pod, rank, message, zygote, Timing(imports=imports, report=report))
        self.made.append(Replacement(self._folder, supervisor, zygote, asyncio.create_task(supervisor.run())))
        return self.made[-1]

    async def order_to_start(self) -> None:
        """Worker 0's rank has ended since that of worker 1 was lost."""
        await until(lambda: 1 in self.port.leader._present)
        await self.restart(1)

    async def restart(self, generation: int) -> None:
        """Worker 0's rank fails, and the leader orders the start of the next generation."""
        self.port.agent.failed(0.0)
        self.port.agent.ended(KILLED, 0.0)

        def ordered() -> bool:
            self.port.agent.tick()
            return self.port.agent.generation == generation

        await until(ordered)


@pytest.fixture
async def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_orphans: None) -> AsyncIterator[Pods]:
    found = Pods(tmp_path, monkeypatch)
    yield found
    for one in found.made:
        one.run.cancel()
        await asyncio.wait([one.run])
        one.end()
    found.port.close()


async def some_turns() -> None:
    """Return after turns of the loop in which all that could be done has been done."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("program", [READY, ENDS], ids=["is ready", "has ended"])
async def test_who_waits_for_the_address_of_worker_0_goes_on_when_its_zygote(pods: Pods, program: str) -> None:
    waits = pods.replacement(program, master="no-such-host.invalid")
    await until(lambda: waits.zygote.pid is not None)
    await until(lambda: not waits.zygote.imports)
    await some_turns()
    assert not waits.run.done()


async def test_ranks_start_when_the_zygote_is_ready(pods: Pods) -> None:
    one = pods.replacement("import os; os.read(0, 1); os.write(0, b'r'); os.read(0, 1)")
    await pods.order_to_start()
    await until(lambda: one.supervisor._gang is not None and one.supervisor._gang.generation == 1)
    await some_turns()
    assert not one.supervisor._processes.ranks
    assert one.zygote._socket is not None
    one.zygote._socket.send(b"g")
    await until(lambda: one.began)


async def test_one_that_never_gets_ready_holds_ranks_up_for_its_time_alone(pods: Pods) -> None:
    one = pods.replacement(IMPORTS, imports=0.05, report=0.05)
    await pods.order_to_start()
    await until(lambda: one.began)
    assert one.zygote.imports


async def test_one_that_never_gets_ready_holds_up_no_restart_of_the_others(pods: Pods) -> None:
    """Red where the pod waits for its zygote although its gang has been stopped again: all would wait for it."""
    one = pods.replacement(IMPORTS)
    await pods.order_to_start()
    await pods.restart(2)
    assert one.zygote.imports


async def test_sigterm_ends_a_pod_while_its_zygote_imports(pods: Pods) -> None:
    one = pods.replacement(IMPORTS)
    await pods.order_to_start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(one.run, GENEROUS) == 143
    assert not one.began


DIES = """
import os, signal, sys
from disttrain_agent import zygote_process
zygote_process.COMMAND = (sys.executable, "-c", "import time; time.sleep(999)")
print(zygote_process.start_zygote(dict(os.environ)).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_zygote_that_imports_ends_with_its_agent() -> None:
    """It asks for that itself, but only after Python has started."""
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr

    def ended() -> bool:
        try:
            return psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    waiting.until(ended, "the zygote has ended")


def test_only_the_replacement_of_a_pod_whose_ranks_restart_starts_it_before_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[dict[str, str]]()
    monkeypatch.setattr(zygote_process, "start_zygote", started.append)
    whole = {Env.REPLACEMENT: "2", Env.RESTARTS_IN_PLACE: "3", Env.CONFIG: "/c", Env.LOCAL_WORLD_SIZE: "1"}
    for name in (Env.REPLACEMENT, Env.RESTARTS_IN_PLACE, Env.CONFIG):
        zygote_process.start_before_the_agent({key: value for key, value in whole.items() if key != name}, [])
    zygote_process.start_before_the_agent(whole, ["python", "mine.py"])
    assert not started
    zygote_process.start_before_the_agent(whole, [])
    zygote_process.start_before_the_agent(whole | {Env.LOCAL_WORLD_SIZE: "8"}, [])
    assert started == [
        whole | {"PYTHONUNBUFFERED": "1"},
        whole | {Env.LOCAL_WORLD_SIZE: "8", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    ]
