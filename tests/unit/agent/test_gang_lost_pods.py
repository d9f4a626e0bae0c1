"""Agents of several pods, as processes, of which one is lost and another one takes its place."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disttrain_api.names import Env, ExitCode
from tests.unit.agent.test_http_api import JOB_TOKEN, a_port, status_of

from .conftest import Pod
from .test_gang_agents import FIRST_LIFE_HOLDS, Gangs, connections, gangs_of, rank_of, start
from .test_restarts_in_place import FINISH, LIVES, restarts

InPlaceOf = Callable[..., Pod]
WAITS = "waiting for another one in its place"


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    yield from gangs_of(Pod, tmp_path)


@pytest.fixture
def in_place_of() -> Iterator[InPlaceOf]:
    """Another pod of the same worker, as the operator makes one."""
    made: list[Pod] = []

    def make(pod: Pod, replacement: int = 1) -> Pod:
        folder = pod.folder.with_name(f"{pod.folder.name}-{replacement}")
        folder.mkdir()
        (folder / "token").write_text((pod.folder / "token").read_text())
        made.append(Pod(folder, ranks=pod.ranks, changes={**pod.changes, Env.REPLACEMENT: str(replacement)}))
        return made[-1]

    yield make
    for pod in made:
        pod.end()


def test_another_pod_in_place_of_a_lost_one_starts_with_the_next_ranks_of_the_others(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    first, second, gone = pods = gangs(3, ranks=2, token=JOB_TOKEN)
    first.changes[Env.AGENT_PORT] = str(a_port())
    start(pods, FIRST_LIFE_HOLDS)
    assert gone.process is not None
    gone.process.kill()
    first.until(lambda: connections(first) == 1, "the connection has ended")
    os.kill(rank_of(second), signal.SIGKILL)
    first.until(lambda: f"the pod of worker 2 is lost; {WAITS}" in first.log, "it waits")
    assert status_of(first).awaited == [2]
    new = in_place_of(gone).start(f"note('generation', os.environ['{Env.GENERATION}'])\n{FINISH}")
    pods = [first, second, new]
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert new.seen("generation") == {4: "1", 5: "1"}
    for pod in (first, second):
        assert set(pod.seen("generation-2").values()) == {"1"}
    found = restarts(first)
    assert (found.count, found.failure.rank, found.failure.reason) == (1, 4, "PodLost")


def test_ranks_that_wait_for_a_lost_pod_are_asked_twice_and_end_by_themselves(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    """Red where they are killed: they would leave no state."""
    first, gone = gangs(2)
    waits = f"""
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
if number == 1:
    ready()
    while len(heard) < 2:
        signal.pause()
    sys.exit({ExitCode.PEER_LOST:d})
{FINISH}
"""
    start([first, gone], waits)
    assert gone.process is not None
    gone.process.kill()
    new = in_place_of(gone).start(FINISH)
    assert [first.wait(), new.wait()] == [0, 0], first.log + new.log
    assert f"rank 0 exited with code {ExitCode.PEER_LOST:d}" in first.log
    assert "they have not ended in time" not in first.log


def test_a_pod_that_is_asked_to_stop_ends_alone_and_the_others_go_on_with_the_next_one(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    """Its ranks have those of the others stop with them: as the trainer's do, after a checkpoint."""
    first, asked = gangs(2)
    program = f"""
if number == 1:
    signal.signal(signal.SIGTERM, lambda *_: (folder.parent / "0" / "stop").touch())
    ready(), wait("../0/stop"), sys.exit({ExitCode.STOPPED:d})
{FINISH}
"""
    start([first, asked], program)
    asked.signal(signal.SIGTERM)
    assert asked.wait() == ExitCode.STOPPED
    first.until(lambda: WAITS in first.log, "it waits")
    new = in_place_of(asked).start(FINISH)
    assert [first.wait(), new.wait()] == [0, 0], first.log + new.log
    assert first.report.failure is None


def test_a_pod_whose_place_another_one_has_taken_starts_no_rank_and_disturbs_nobody(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    first, gone = gangs(2)
    start([first, gone], f"ready(), wait('go')\n{FINISH}")
    assert gone.process is not None
    gone.process.kill()
    current = in_place_of(gone, 2).start(f"{LIVES}ready(), wait('go')\n{FINISH}").until_ready()
    former = in_place_of(gone, 1).start("note('started')")
    assert former.wait() == ExitCode.PEER_LOST
    assert former.failure.message == "another pod has taken its place"
    assert not former.seen("started")
    for pod in (first, current):
        (pod.folder / "go").touch()
    assert [first.wait(), current.wait()] == [0, 0], first.log + current.log
    assert restarts(first).count == 1


def test_a_pod_in_place_of_another_one_starts_no_rank_where_the_gang_is_left(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    first, second = gangs(2)
    start([first, second], f"ready(), wait('go'), sys.exit({ExitCode.DISK_FULL:d})")
    (second.folder / "go").touch()
    assert second.wait() == ExitCode.DISK_FULL
    new = in_place_of(second).start("note('started')")
    assert new.wait() == ExitCode.PEER_LOST
    assert new.failure.message == "worker 1: DiskFull is not for this pod to repair"
    assert not new.seen("started")


@pytest.mark.parametrize("amid", [False, True], ids=["while all train", "amid a restart"])
def test_another_pod_in_place_of_worker_0s_leads_the_others_into_the_next_generation(
    gangs: Gangs, in_place_of: InPlaceOf, amid: bool
) -> None:
    gone, second, third = pods = gangs(3, token=JOB_TOKEN)
    second.changes[Env.AGENT_PORT] = str(a_port())
    program = f"""
note(f"generation-{{number}}", os.environ["{Env.GENERATION}"])
if number == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 0 else signal.SIG_DFL)
    ready(), [signal.pause() for _ in range(9)]
{FINISH}
"""
    start(pods, program)
    assert gone.process is not None
    if amid:
        os.kill(rank_of(second), signal.SIGKILL)
        third.until(
            lambda: "because a rank of another pod failed" in third.log, "they wait for rank 0, which ends slowly"
        )
    gone.process.kill()
    gone.wait()
    if not amid:
        second.until(lambda: not connections(second), "the connection has ended")
        os.kill(rank_of(second), signal.SIGKILL)
        second.until(lambda: "was killed by signal 9" in second.log, "its rank has ended")
    second.until(lambda: f"worker 0's agent is lost; {WAITS}" in second.log, "it waits")
    second.until(lambda: "aiohttp" in maps_of(second), "it has loaded what the first request needs")
    assert status_of(second).awaited == [0]
    new = in_place_of(gone).start(f"note('generation', os.environ['{Env.GENERATION}'])\n{FINISH}")
    pods = [new, second, third]
    assert [pod.wait() for pod in pods] == [0, 0, 0], "\n".join(pod.log for pod in pods)
    assert new.seen("generation") == {0: "1"}
    for pod in (second, third):
        assert list(pod.seen("generation-2").values()) == ["1"]
        assert len(list(pod.folder.glob("life-*"))) == 2
    found = restarts(new)
    assert (found.count, found.failure.rank, found.failure.reason) == (1, 0, "PodLost")
    assert "restart 1 in place: rank 0 was lost with its pod" in new.log


def maps_of(pod: Pod) -> str:
    """The files that its agent has mapped, such as the libraries that it has loaded."""
    assert pod.process is not None
    return Path(f"/proc/{pod.process.pid}/maps").read_text()


def test_who_leads_after_worker_0s_pod_was_lost_knows_how_many_restarts_are_left(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    gone, other = pods = gangs(2, **{Env.RESTARTS_IN_PLACE: "1"})
    program = "ready()\nif rank == 1:\n    wait(f'now-{number}'), sys.exit(10 + number)\nsignal.pause()"
    start(pods, program)
    (other.folder / "now-1").touch()
    other.until(lambda: len(list(other.folder.glob("life-*"))) == 2, "the second life")
    assert gone.process is not None
    gone.process.kill()
    gone.wait()
    new = in_place_of(gone)
    # Its own name may have no address yet. Where others find it on the loopback interface, no rank meets them there.
    name = new.changes[Env.MASTER_ADDR] = "digits-0.no-such-host.invalid"
    noted = f"note('generation', os.environ['{Env.GENERATION}']), note('meets', os.environ['{Env.MASTER_ADDR}'])"
    new.start(f"{noted}\nsignal.pause()")
    other.until(lambda: len(list(other.folder.glob("life-*"))) == 3, "the third life")
    (other.folder / "now-3").touch()
    assert other.wait() == 13
    assert new.wait() == ExitCode.PEER_LOST
    assert (new.seen("generation"), new.seen("meets")) == ({0: "2"}, {0: name})
    assert restarts(new).count == 2
    assert "1 restarts in place without a new checkpoint are used up" in new.log


def test_worker_0s_pod_that_is_asked_to_stop_ends_alone_and_the_others_go_on_with_the_next_one(
    gangs: Gangs, in_place_of: InPlaceOf
) -> None:
    """Its ranks have those of the others stop with them: as the trainer's do, after a checkpoint."""
    asked, other = pods = gangs(2)
    program = f"""
if number == 1:
    signal.signal(signal.SIGTERM, lambda *_: (folder.parent / "1" / "stop").touch())
    ready(), wait("../1/stop"), sys.exit({ExitCode.STOPPED:d})
{FINISH}
"""
    start(pods, program)
    asked.signal(signal.SIGTERM)
    assert asked.wait() == ExitCode.STOPPED
    other.until(lambda: f"exited with code {ExitCode.STOPPED:d}" in other.log, "its rank has obeyed, too")
    new = in_place_of(asked).start(FINISH)
    assert [new.wait(), other.wait()] == [0, 0], new.log + other.log
    assert other.report.failure is None
    assert len(list(other.folder.glob("life-*"))) == 2


def test_a_pod_that_waits_for_worker_0s_ends_as_soon_as_it_is_asked_to(gangs: Gangs) -> None:
    gone, left = pods = gangs(2)
    start(pods, FIRST_LIFE_HOLDS)
    assert gone.process is not None
    gone.process.kill()
    left.until(lambda: not connections(left), "the connection has ended")
    os.kill(rank_of(left), signal.SIGKILL)
    left.until(lambda: "was killed by signal 9" in left.log, "its rank has ended")
    left.signal(signal.SIGTERM)
    assert left.wait() == 137
    assert left.failure.signal == 9
    assert len(list(left.folder.glob("life-*"))) == 1
