"""A rank of several that the kernel kills since the pod has reached its memory limit, while its agent lives on."""

from collections.abc import Callable, Iterator

import pytest

from disttrain_api.names import Reason
from tests.small_memory import small_memory

from .conftest import Pod
from .test_restarts_in_place import FINISH, LIVES, in_place, restarts

LIMIT = 256 * 2**20
Pods = Callable[..., Pod]

TAKE = """
def take_all():
    # The kernel takes the process with the highest score.
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    taken = []
    while True:
        taken.append(bytearray(b"x" * 2**22))
"""


@pytest.fixture
def small(pods: Pods) -> Iterator[Pods]:
    """Makes pods whose ranks restart in place and that have LIMIT bytes."""
    with small_memory(LIMIT) as before:

        def make(**facts: str) -> Pod:
            pod = in_place(pods, **facts)
            pod.before = before
            return pod

        yield make


def test_a_rank_that_has_run_out_of_memory_starts_again_in_its_pod(small: Pods) -> None:
    pod = small()
    program = f"""
if number == 1 and rank == 1:
    wait("life-1.0"), take_all()
if number == 1:
    signal.pause()
{FINISH}
"""
    assert pod.run(LIVES + TAKE + program) == 0, pod.log
    found = restarts(pod)
    assert (found.count, found.failure.rank, found.failure.signal) == (1, 1, 9)
    assert (found.failure.reason, found.failure.out_of_memory) == (Reason.OOM_KILLED, True)
    assert "restart 1 in place: rank 1 ran out of memory" in pod.log


def test_one_that_runs_out_of_memory_again_without_a_checkpoint_between_ends_the_pod(small: Pods) -> None:
    pod = small()
    assert pod.run(LIVES + TAKE + "take_all() if rank == 1 else signal.pause()") == 137, pod.log
    assert restarts(pod).count == 1
    assert (pod.failure.rank, pod.failure.reason) == (1, Reason.OOM_KILLED)
    assert "no restart in place: a rank has run out of memory again, without a new checkpoint in between" in pod.log


def test_the_agent_knows_whether_memory_ran_out_in_this_life_of_its_ranks(small: Pods) -> None:
    """Container runtimes remember a kill, of a data loader for example, as long as the container runs."""
    pod = small(ranks=1, restarts="1")
    program = """
if number == 1:
    if os.fork() == 0:
        take_all()
    os.wait()
    sys.exit(5)
sys.exit(3)
"""
    assert pod.run(LIVES + TAKE + program) == 3, pod.log
    former = restarts(pod).failure
    assert (former.out_of_memory, former.reason, pod.failure.out_of_memory) == (True, None, False)
