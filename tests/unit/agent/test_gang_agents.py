"""Agents of several pods, as processes, which start the ranks of all of them again together."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from disttrain_api.names import Env, ExitCode
from tests.unit.agent.test_http_api import a_port

from .conftest import Pod
from .test_restarts_in_place import FINISH, LIVES, restarts

P = TypeVar("P", bound=Pod)
Gangs = Callable[..., list[Pod]]
HOLD = "signal.signal(signal.SIGTERM, signal.SIG_DFL); ready(); signal.pause()"
FIRST_LIFE_HOLDS = f"""
note(f"generation-{{number}}", os.environ["{Env.GENERATION}"])
if number == 1:
    {HOLD}
{FINISH}
"""


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    yield from gangs_of(Pod, tmp_path)


def gangs_of(kind: type[P], tmp_path: Path, *, tracebacks: bool = False) -> Iterator[Callable[..., list[P]]]:
    """Yield what makes pods of this kind; they end afterwards. tracebacks: whether ranks may have written any."""
    made: list[P] = []

    def make(pods: int = 2, ranks: int = 1, token: str = "a token of the job", **changes: str | None) -> list[P]:
        port = str(a_port())
        for index in range(pods):
            folder = tmp_path / str(index)
            folder.mkdir()
            (folder / "token").write_text(token)
            own = {
                Env.NODE_RANK: str(index),
                Env.WORLD_SIZE: str(pods * ranks),
                Env.GANG_PORT: port,
                Env.RESTARTS_IN_PLACE: "3",
                Env.RESTART_BACKOFF_SECONDS: "0",
                Env.JOB_UID: "uid-1",
            }
            made.append(kind(folder, ranks=ranks, changes=own | changes))
        return made

    yield make
    for pod in made:
        pod.end()
    assert tracebacks or not any("Traceback" in pod.log for pod in made), "\n".join(pod.log for pod in made)


def start(pods: list[Pod], program: str) -> None:
    """Start all pods; returns when the ranks run and the agents are connected."""
    for pod in pods:
        pod.start(LIVES + program)
    for pod in pods:
        pod.until_ready()
    pods[0].until(lambda: f"all {len(pods)} workers are connected" in pods[0].log, "all agents take part")


def connections(pod: Pod) -> int:
    """Return how many connections its agent has with other agents."""
    assert pod.process is not None
    port = int(pod.changes[Env.GANG_PORT] or 0)
    found = psutil.Process(pod.process.pid).net_connections("tcp")
    ends = [(one.laddr.port, one.raddr.port) for one in found if one.status == psutil.CONN_ESTABLISHED]
    return sum(port in ports for ports in ends)


def rank_of(pod: Pod, life: int = 1) -> int:
    """The process of the pod's first rank."""
    (path,) = pod.folder.glob(f"life-{life}.*") if pod.ranks == 1 else sorted(pod.folder.glob(f"life-{life}.*"))[:1]
    return int(path.read_text())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_restarts_all_of_them_below_the_same_agents(gangs: Gangs, victim: int) -> None:
    pods = gangs(3)
    start(pods, FIRST_LIFE_HOLDS)
    os.kill(rank_of(pods[victim]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    for pod in pods:
        assert [list(pod.seen(f"generation-{number}").values()) for number in (1, 2)] == [["0"], ["1"]]
        assert pod.report.failure is None
    assert (restarts(pods[0]).count, restarts(pods[0]).failure.rank, restarts(pods[0]).failure.signal) == (1, victim, 9)
    assert [pod.report.restarts_in_place for pod in pods[1:]] == [None, None]


def test_ranks_of_several_pods_that_fail_at_once_are_one_restart(gangs: Gangs) -> None:
    pods = gangs(3)
    start(pods, FIRST_LIFE_HOLDS)
    for pod in pods[1:]:
        os.kill(rank_of(pod), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert restarts(pods[0]).count == 1
    assert restarts(pods[0]).failure.signal == signal.SIGKILL
    assert [len(list(pod.folder.glob("life-*"))) for pod in pods] == [2, 2, 2]


def test_a_rank_that_fails_while_all_start_again_is_another_restart(gangs: Gangs) -> None:
    pods = gangs(2)
    program = f"""
if number == 1:
    {HOLD}
if number == 2 and rank == 1:
    sys.exit(7)
if number == 2:
    signal.pause()
{FINISH}
"""
    start(pods, program)
    os.kill(rank_of(pods[0]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert (restarts(pods[0]).count, restarts(pods[0]).failure.exit_code) == (2, 7)
    assert [len(list(pod.folder.glob("life-*"))) for pod in pods] == [3, 3]


def test_no_pod_starts_again_before_nothing_is_left_in_any(gangs: Gangs) -> None:
    pods = gangs(2)
    orphan = pods[1].folder / "orphan"
    program = f"""
if number == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1 and os.fork() == 0:
        os.setsid()
        (folder / "orphan").write_text(str(os.getpid()))
        signal.pause()
    if rank == 1:
        wait("orphan")
    ready(), [signal.pause() for _ in range(9)]
former = [int(path.read_text()) for path in [*folder.parent.glob("*/life-1.*"), *folder.parent.glob("*/orphan")]]
note("alive", [pid for pid in former if os.path.exists(f"/proc/{{pid}}")])
note("former", len(former))
{FINISH}
"""
    start(pods, program)
    assert orphan.exists()
    os.kill(rank_of(pods[0]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    for pod in pods:
        assert (*pod.seen("alive").values(), *pod.seen("former").values()) == ("[]", "3")


def test_the_first_cause_is_reported_and_not_that_its_peers_lost_it(gangs: Gangs) -> None:
    pods = gangs(2)
    program = f"""
if number == 1 and rank == 0:
    ready(), wait("gone")
    report(step=4, totalSteps=9, error=dict(exitCode={ExitCode.PEER_LOST:d}, reason="PeerLost", message="lost"))
    sys.exit({ExitCode.PEER_LOST:d})
if number == 1:
    ready(), signal.pause()
{FINISH}
"""
    start(pods, program)
    (pods[0].folder / "gone").touch()
    pods[0].until(lambda: "exited with code" in pods[0].log, "the symptom is there")
    os.kill(rank_of(pods[1]), signal.SIGKILL)
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert restarts(pods[0]).failure.rank == 1


@pytest.mark.parametrize("code", [ExitCode.DATA_NOT_FOUND, ExitCode.DISK_FULL])
def test_what_no_restart_can_repair_ends_its_pod_and_restarts_no_other(gangs: Gangs, code: int) -> None:
    pods = gangs(2)
    start(pods, f"ready()\nif rank == 1:\n    wait('now'), sys.exit({code:d})\nsignal.pause()")
    (pods[1].folder / "now").touch()
    assert pods[1].wait() == code
    assert pods[1].failure.exit_code == code
    assert pods[0].process is not None
    os.kill(rank_of(pods[0]), signal.SIGKILL)
    assert pods[0].wait() == 137, "nor does a later failure"
    assert [len(list(pod.folder.glob("life-*"))) for pod in pods] == [1, 1]


def test_a_failure_that_comes_again_ends_all_pods_and_the_operator_learns_which_it_is(gangs: Gangs) -> None:
    pods = gangs(2)
    signature = {"error": "NameError", "place": "/app/m.py:1", "step": 4, "stepsDone": 4}
    error = {"exitCode": 1, "reason": "RankFailed", "message": "NameError: x", "signature": signature}
    program = f"""
ready()
if rank == 1:
    wait("now")
    report(step=4, totalSteps=9, error={error!r})
    sys.exit(1)
signal.pause()
"""
    start(pods, program)
    (pods[1].folder / "now").touch()
    assert pods[1].wait() == 1
    assert pods[0].wait() == ExitCode.PEER_LOST
    assert (pods[1].failure.repeated, pods[1].failure.exit_code) == (True, 1)
    assert (pods[0].failure.repeated, pods[0].failure.signal) == (False, None), "its rank was stopped for the other"
    assert restarts(pods[0]).count == 1


def test_no_pod_waits_for_one_whose_ranks_have_succeeded(gangs: Gangs) -> None:
    failed, done = pods = gangs(2)
    start(pods, f"ready(), wait('go')\nif rank == 0:\n    sys.exit(7)\n{FINISH}")
    (done.folder / "go").touch()
    assert done.wait() == 0
    (failed.folder / "go").touch()
    assert failed.wait() == 7
    assert "no restart in place: worker 1: its ranks have succeeded" in failed.log


def test_a_pod_with_another_token_takes_no_part(gangs: Gangs) -> None:
    pods = gangs(2)
    (pods[1].folder / "token").write_text("of another job")
    for pod in pods:
        pod.start(LIVES + FIRST_LIFE_HOLDS)
    for pod in pods:
        pod.until_ready()
    pods[1].until(lambda: "does not know the token" in pods[1].log, "it is refused")
    os.kill(rank_of(pods[1]), signal.SIGKILL)
    assert pods[1].wait() == 137
    os.kill(rank_of(pods[0]), signal.SIGKILL)
    assert pods[0].wait() == 137


def test_a_second_restart_follows_the_first_and_the_budget_is_of_all(gangs: Gangs) -> None:
    pods = gangs(2, **{Env.RESTARTS_IN_PLACE: "2"})
    program = "ready()\nif rank == 1:\n    wait(f'now-{number}'), sys.exit(10 + number)\nsignal.pause()"
    start(pods, program)
    for number in (1, 2, 3):
        pods[1].until(lambda number=number: len(list(pods[1].folder.glob("life-*"))) == number, "the next life")
        (pods[1].folder / f"now-{number}").touch()
    assert pods[1].wait() == 13
    assert pods[0].wait() == ExitCode.PEER_LOST
    assert (restarts(pods[0]).count, restarts(pods[0]).failure.exit_code) == (2, 12)
    assert pods[1].failure.exit_code == 13
