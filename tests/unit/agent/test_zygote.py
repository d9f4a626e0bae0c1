"""Ranks of the trainer that start again are forks of a process that has imported torch, and none can tell."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from disttrain_agent.zygote import Zygote
from disttrain_api.names import Env
from tests.unit.trainer.worlds import job, small
from tests.waiting import GENEROUS, until
from tools.cluster.ports import free_port

from .conftest import Pod
from .test_gang_agents import Gangs, gangs_of
from .test_gang_lost_pods import InPlaceOf, in_place_of

__all__ = ["in_place_of"]
PATIENT = 240.0


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    yield from gangs_of(Pod, tmp_path, tracebacks=True)


def noted(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of all lives have noted of themselves, the oldest first."""
    notes = sorted(folder.glob("rank.*"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(text) | {"pid": int(path.suffix[1:])} for path in notes if (text := path.read_text())]


def zygote(pod: Pod) -> psutil.Process | None:
    """The process below the agent that is ready to fork."""
    found = psutil.Process(pod.process.pid).children()
    return next((process for process in found if process.name() == "zygote"), None)


def has_ended(process: psutil.Process) -> bool:
    """Whether it has, also where nobody has asked yet how: an orphan waits for this machine's process 1."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("lost", [False, True], ids=["forked", "without the zygote"])
def test_ranks_start_again_as_forks_that_are_as_programs_of_their_own(pods: Callable[..., Pod], lost: bool) -> None:
    places = {Env.WORLD_SIZE: "2", Env.NODE_RANK: "0", Env.MASTER_PORT: str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    # numpy's threads, which the zygote must not fork with.
    places["OPENBLAS_NUM_THREADS"] = "2"
    pod = pods(2, **places, **{Env.RESTARTS_IN_PLACE: "3", Env.RESTART_BACKOFF_SECONDS: "0"})
    data = {
        "entrypoint": "tests.unit.agent.held_code:held_samples",
        "config": {"samples": 200, "folder": str(pod.folder)},
    }
    (pod.folder / "job.json").write_text(json.dumps(job(small(data=data, steps=40, logging={"interval": 1}))))
    pod.start_command([])

    def log() -> str:
        return pod.log

    until(lambda: len(noted(pod.folder)) == 2, log, seconds=PATIENT)
    ready = until(lambda: zygote(pod), log, seconds=PATIENT)
    assert ready is not None
    if lost:
        ready.kill()
        until(lambda: has_ended(ready), log)
    first = noted(pod.folder)
    os.kill(next(rank["pid"] for rank in first if rank["rank"] == "1"), signal.SIGKILL)
    until(lambda: len(noted(pod.folder)) == 4, log, seconds=PATIENT)
    second = noted(pod.folder)[2:]
    (pod.folder / "on").touch()
    assert pod.wait(PATIENT) == 0, pod.log
    restarts = pod.report.restarts_in_place
    assert (restarts.count, pod.progress.done) == (1, True)
    for rank in second:
        before = next(other for other in first if other["rank"] == rank["rank"])
        for name in before.keys() - {"pid", "name"}:
            assert rank[name] == before[name], name
        assert rank["pid"] != before["pid"]
        assert rank["name"] == (before["name"] if lost else f"rank {rank['rank']}")
    assert len({rank["pid"] for rank in second}) == 2
    until(lambda: has_ended(ready), "the zygote ends with its agent")


@pytest.mark.parametrize("program", ["", "import os; os.write(0, b'r')"], ids=["it ends", "it is ready"])
def test_who_waits_for_its_imports_hears_that_they_are_over(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Red where a replacement whose zygote has ended waits for it until its time is over."""
    monkeypatch.setattr("disttrain_agent.zygote_process.COMMAND", (sys.executable, "-c", program))

    async def wait() -> tuple[bool, bool]:
        zygote, over = Zygote(), asyncio.Event()
        zygote.changed = over.set
        zygote.begin(dict(os.environ))
        imports = zygote.imports
        await asyncio.wait_for(over.wait(), GENEROUS)
        found = imports, zygote.imports
        zygote.close()
        return found

    assert asyncio.run(wait()) == (True, False)


def test_the_first_ranks_of_a_replacement_are_forks_of_what_has_imported_before_their_order(
    gangs: Gangs, in_place_of: InPlaceOf, tmp_path: Path
) -> None:
    def begin(pod: Pod) -> Pod:
        data = {
            "entrypoint": "tests.unit.agent.held_code:held_samples",
            "config": {"samples": 200, "folder": str(tmp_path)},
        }
        (pod.folder / "job.json").write_text(json.dumps(job(small(data=data, steps=40, logging={"interval": 1}))))
        return pod.start_command([])

    first, gone = gangs(2, **{Env.MASTER_PORT: str(free_port()), "CUDA_VISIBLE_DEVICES": ""})
    for pod in (first, gone):
        begin(pod)
    until(lambda: len(noted(tmp_path)) == 2, lambda: first.log + gone.log, seconds=PATIENT)
    assert gone.process is not None
    gone.process.kill()
    new = begin(in_place_of(gone))
    until(lambda: len(noted(tmp_path)) == 4, lambda: first.log + new.log, seconds=PATIENT)
    (tmp_path / "on").touch()
    assert [pod.wait(PATIENT) for pod in (first, new)] == [0, 0], first.log + new.log
    names = {rank["name"] for rank in noted(tmp_path)[2:] if rank["rank"] == "1"}
    assert names == {"rank 1"}
    assert noted(tmp_path)[0]["name"] != "rank 0", "first starts are programs"
