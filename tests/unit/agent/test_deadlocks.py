"""Real ranks that wait for each other, or for their data: what is said of them by the stacks that their agent gives."""

import json
import re
from collections.abc import Callable

import pytest

from disttrain_api.names import Env
from disttrain_api.stacks import decode_stacks
from disttrain_operator.decide.live import Blame
from disttrain_operator.decide.stacks import blame_of
from tools.cluster.paths import REPOSITORY

from .conftest import Pod
from .test_http_api import JOB_TOKEN, a_port, ask

RANK = f"""
sys.path[:0] = [str(pathlib.Path({str(REPOSITORY)!r}) / name) for name in ("api", "trainer_image")]
import queue, socket
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from disttrain_agent.stacks import answer_for_stacks

size = int(os.environ["{Env.WORLD_SIZE}"])
answer_for_stacks(rank, pathlib.Path(os.environ["{Env.REPORT_DIR}"]))
dist.init_process_group("gloo", init_method=f"file://{{folder}}/meeting", rank=rank, world_size=size)
of_evaluations, numbers, server = dist.new_group(), torch.ones(1), socket.socketpair()

class Remote(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return server[0].recv(1)

def sum_gradients():
    dist.all_reduce(numbers)

def share_score():
    dist.broadcast(numbers, src=0, group=of_evaluations)

def read():
    next(iter(DataLoader(Remote())))

def take_step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    result = model(torch.ones(1, 1))
    if rank == 1:
        # Waits in C code: no call of Python's is seen.
        result.register_hook(queue.SimpleQueue().get)
    result.sum().backward()

dist.barrier()
ready()
"""
FUNCTIONS = ("sum_gradients", "share_score", "read", "take_step")
Deadlocked = Callable[[int, str], Blame | None]


@pytest.fixture
def deadlocked(pods: Callable[..., Pod]) -> Deadlocked:
    """Starts ranks that never end what they do; returns what their stacks say of them."""

    def start(ranks: int, what: str) -> Blame | None:
        first = {Env.WORLD_SIZE: str(ranks), Env.NODE_RANK: "0", Env.AGENT_PORT: str(a_port())}
        pod = pods(ranks, **first)
        (pod.folder / "token").write_text(JOB_TOKEN)
        pod.start(RANK + what)

        pod.until_ready()
        last: dict[int, str] = {}

        def all_are_there() -> bool:
            nonlocal last
            code, answer = ask(pod, "/v1/stacks?thread=main")
            assert code == 200
            former, last = last, dict(decode_stacks(json.dumps(answer).encode(), range(ranks)))
            there = [text for text in last.values() if any(f" in {name}\n" in text for name in FUNCTIONS)]
            return len(there) == ranks and former == last

        pod.until(all_are_there, "each rank stands in its call")
        return blame_of(last)

    return start


def test_two_ranks_in_different_collective_calls_are_both_named_and_none_is_blamed(deadlocked: Deadlocked) -> None:
    found = deadlocked(2, "share_score() if rank == 1 else sum_gradients()")
    assert found is not None
    assert (found.rank, found.certain) == (None, True)
    first, second = found.why.split(", and ")
    assert first.startswith("rank 0 waits in all_reduce (distributed_c10d.py:")
    assert "< sum_gradients (rank.py:" in first
    assert second.startswith("rank 1 waits in broadcast (distributed_c10d.py:")
    assert "< share_score (rank.py:" in second
    assert second.endswith(": they wait for each other")


def test_the_one_of_three_ranks_that_has_gone_astray_is_named(deadlocked: Deadlocked) -> None:
    found = deadlocked(3, "share_score() if rank == 2 else sum_gradients()")
    assert found is not None
    assert (found.rank, found.certain) == (2, True)
    assert "share_score (rank.py:" in found.why
    assert "2 others wait, rank 0 in all_reduce (distributed_c10d.py:" in found.why


def test_ranks_whose_data_do_not_come_are_said_to_wait_for_data(deadlocked: Deadlocked) -> None:
    found = deadlocked(2, "read()")
    assert found is not None
    assert (found.rank, found.certain) == (None, False)
    assert found.why.startswith("all ranks wait for data, ranks 0 and 1 are in __getitem__ (rank.py:")


def test_the_rank_that_has_not_begun_the_call_of_the_others_is_named_by_the_recorder(deadlocked: Deadlocked) -> None:
    """Both are in their backward passes, one without an end and one in DDP's sum: the stacks alone say nothing."""
    found = deadlocked(2, "take_step()")
    assert found is not None
    assert (found.rank, found.certain, found.awaited) == (1, False, False)
    assert re.match(
        r"has not begun call \d+: gloo:all_reduce of 2 in group 0 \(default_pg\), and rank 0 waits in it: it is in"
        r" _engine_run_backward ",
        found.why,
    ), found.why
