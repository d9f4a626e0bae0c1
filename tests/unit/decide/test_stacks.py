"""Stacks are told as one line, and name the rank that does something else than those that wait for it."""

from typing import Any

import pytest

from disttrain_api.stacks import STOPPED
from disttrain_operator.decide.live import Blame
from disttrain_operator.decide.stacks import blame_of, in_one_group, main_stack
from tests.builders import a_job

OF_FAULTHANDLER = """Thread 0x7f (most recent call first):
  File "/x/pool.py", line 1 in run

Current thread 0x7e (most recent call first):
  File "/x/y/c10d.py", line 28 in all_reduce
  File "/x/step.py", line 9 in step
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (OF_FAULTHANDLER, "all_reduce (c10d.py:28) < step (step.py:9)"),
        ("it does not answer: it is stopped", "it does not answer: it is stopped"),
        ("a\x1b[31m\n b", "a?[31m b"),
    ],
)
def test_a_stack_is_one_line_of_the_thread_that_answered(text: str, line: str) -> None:
    assert main_stack(text) == line


def test_a_stack_without_end_is_cut() -> None:
    assert len(main_stack("x" * 10**6).encode()) <= 1200
    deep = "Current thread 0x1 (most recent call first):\n" + '  File "/a.py", line 1 in recurse\n' * 10**5
    assert len(main_stack(deep).encode()) <= 1200


def stack(*calls: str, prefix: str = "/site-packages") -> str:
    """What faulthandler writes of a main thread in these calls, the innermost first."""
    frames = "".join(
        f'  File "{prefix}/{path}", line 7 in {name}\n' for path, _, name in (c.partition(":") for c in calls)
    )
    return f"Current thread 0x1 (most recent call first):\n{frames}"


STEP = "disttrain_trainer/step.py:step"
REDUCE = stack("torch/distributed/c10d.py:all_reduce", "disttrain_trainer/runtime/mesh.py:sum", STEP)
BACKWARD = stack("torch/autograd/graph.py:_engine_run_backward", "torch/_tensor.py:backward", STEP)
COUNTS = stack("disttrain_trainer/runtime/mesh.py:result", STEP)
BARRIER = stack("torch/distributed/c10d.py:barrier", "mine.py:forward", STEP)
LOADING = stack("mine.py:__getitem__", "disttrain_trainer/data/batches.py:load", STEP)
READING = stack("disttrain_trainer/data/corpus.py:__getitem__", STEP)
SLOW_WRITE = stack("disttrain_trainer/metrics/report.py:_append", STEP)
COMPUTING = stack("mine.py:forward", STEP)
BUFFERS = stack("torch/nn/parallel/distributed.py:_distributed_broadcast_coalesced", STEP)
BROADCAST = stack("torch/distributed/distributed_c10d.py:broadcast", "mine.py:forward", STEP)
FORWARDS = stack(
    "torch/distributed/distributed_c10d.py:recv", "disttrain_trainer/parallel/pipeline/stages.py:get", STEP
)
BACKWARDS = stack("torch/distributed/pipelining/schedules.py:_wait_batch_p2p", STEP)
SILENT = "it does not answer: it is stopped, or the disk is full"
IN_REDUCE = "all_reduce (c10d.py:7) < sum (mesh.py:7) < step (step.py:7)"


@pytest.mark.parametrize(
    ("stacks", "rank", "why"),
    [
        ([REDUCE, SILENT, REDUCE], 1, f"does not answer, and 2 others wait, rank 0 in {IN_REDUCE}"),
        ([REDUCE, SILENT], 1, f"does not answer, and rank 0 waits in {IN_REDUCE}"),
        ([SILENT, REDUCE, SILENT], 0, f"does not answer, and rank 1 waits in {IN_REDUCE}"),
        ([BACKWARD, BACKWARD, LOADING], 2, "is in __getitem__ (mine.py:7) < load"),
        ([LOADING, COUNTS], 0, "and rank 1 waits in result (mesh.py:7) < step (step.py:7)"),
        ([COUNTS, READING], 1, "is in __getitem__ (corpus.py:7)"),
        ([BACKWARD, BARRIER, BACKWARD], 1, "is in barrier (c10d.py:7) < forward (mine.py:7)"),
    ],
    ids=[
        "a silent rank", "of two ranks", "two silent ranks", "slow samples", "of two ranks, samples",
        "samples of ours", "another collective",
    ],
)  # fmt: skip
def test_the_rank_that_others_wait_for_is_named(stacks: list[str], rank: int, why: str) -> None:
    found = blame_of(dict(enumerate(stacks)))
    assert found is not None
    assert found.rank == rank
    assert why in found.why


@pytest.mark.parametrize(
    "stacks",
    [
        [], [SILENT], [SILENT, SILENT], [STOPPED, STOPPED], [REDUCE], [REDUCE, REDUCE], [LOADING, COMPUTING],
    ],
    ids=str,
)  # fmt: skip
def test_nobody_is_blamed_where_the_stacks_do_not_tell(stacks: list[str]) -> None:
    assert blame_of(dict(enumerate(stacks))) is None


@pytest.mark.parametrize(
    ("stacks", "rank", "certain"),
    [
        ([REDUCE, STOPPED, SILENT], 1, True),
        ([SILENT, STOPPED, REDUCE], 1, True),
        ([REDUCE, SILENT, REDUCE], 1, False),
        ([REDUCE, LOADING, REDUCE], 1, False),
        ([BACKWARD, BARRIER, BACKWARD], 1, True),
        ([REDUCE, SLOW_WRITE, REDUCE], 1, False),
        ([COUNTS, REDUCE, COUNTS], 1, True),
        ([SLOW_WRITE, REDUCE, SLOW_WRITE], 1, False),
    ],
    ids=[
        "stopped", "stopped, not the first silent one", "silent", "reads", "another collective", "writes", "counts",
        "others write",
    ],
)  # fmt: skip
def test_only_a_rank_that_cannot_be_slow_is_certain(stacks: list[str], rank: int, certain: bool) -> None:
    found = blame_of(dict(enumerate(stacks)))
    assert found is not None
    assert (found.rank, found.certain) == (rank, certain)


IN_BARRIER = "barrier (c10d.py:7) < forward (mine.py:7) < step (step.py:7)"
IN_BROADCAST = "broadcast (distributed_c10d.py:7) < forward (mine.py:7) < step (step.py:7)"
IN_BACKWARD = "_engine_run_backward (graph.py:7) < backward (_tensor.py:7) < step (step.py:7)"
IN_RECV = "recv (distributed_c10d.py:7) < get (stages.py:7) < step (step.py:7)"
MUTUAL = ": they wait for each other"


@pytest.mark.parametrize(
    ("stacks", "rank", "why"),
    [
        ([REDUCE] * 3 + [BARRIER] * 2, 3, f"is in {IN_BARRIER}, as rank 4, and 3 others wait, rank 0 in {IN_REDUCE}"),
        ([BARRIER, *[REDUCE] * 3, BROADCAST], 0, f"{IN_BARRIER}, rank 4 is in {IN_BROADCAST}, and 3 others wait"),
        ([REDUCE, LOADING, REDUCE, COMPUTING, LOADING], 1, "ranks 3 and 4 compute or read too, and 2 others wait"),
    ],
    ids=["two in the same calls", "two in different calls", "several that compute"],
)  # fmt: skip
def test_all_that_have_gone_astray_are_named(stacks: list[str], rank: int, why: str) -> None:
    found = blame_of(dict(enumerate(stacks)))
    assert found is not None
    assert found.rank == rank
    assert why in found.why


@pytest.mark.parametrize(
    ("stacks", "why", "certain"),
    [
        ([REDUCE, BARRIER], f"rank 0 waits in {IN_REDUCE}, and rank 1 waits in {IN_BARRIER}{MUTUAL}", True),
        ([REDUCE, BUFFERS], "rank 1 waits in _distributed_broadcast_coalesced (distributed.py:7) < step", False),
        ([BARRIER, REDUCE, BARRIER, REDUCE],
         f"ranks 0 and 2 wait in {IN_BARRIER}, and ranks 1 and 3 wait in {IN_REDUCE}{MUTUAL}", True),
        ([BARRIER, REDUCE, COUNTS], f"and rank 2 waits in result (mesh.py:7) < step (step.py:7){MUTUAL}", True),
        ([BACKWARD, BARRIER], f"rank 0 is in {IN_BACKWARD}, and rank 1 waits in {IN_BARRIER}", False),
        ([FORWARDS, BACKWARDS], f"rank 0 waits in {IN_RECV}, and rank 1 waits in _wait_batch_p2p", False),
        ([FORWARDS, BACKWARDS, BACKWARDS], "ranks 1 and 2 wait in _wait_batch_p2p", False),
        ([LOADING, READING], "all ranks wait for data, rank 0 is in __getitem__ (mine.py:7) < load", False),
        ([READING], "all ranks wait for data, rank 0 is in __getitem__", False),
    ],
    ids=[
        "two ranks", "buffers", "two halves", "each elsewhere", "one may compute its gradient", "two stages", "stages",
        "a data server that is silent", "the only rank reads",
    ],
)  # fmt: skip
def test_where_nobody_is_to_blame_alone_it_is_said_where_all_are(stacks: list[str], why: str, certain: bool) -> None:
    found = blame_of(dict(enumerate(stacks)))
    assert found is not None
    assert (found.rank, found.certain) == (None, certain)
    assert why in found.why
    assert ("for each other" in found.why) is certain


def test_calls_are_shown_as_far_as_they_differ() -> None:
    inner = ["torch/distributed/c10d.py:all_reduce", "mesh.py:sum", "mesh.py:both", "mesh.py:all"]
    found = blame_of({0: stack(*inner, "a.py:evaluate", STEP), 1: stack(*inner, "b.py:train", STEP)})
    assert found is not None
    assert "all (mesh.py:7) < evaluate (a.py:7), and rank 1 waits in" in found.why
    assert "step" not in found.why


def test_a_rank_is_not_astray_where_others_have_collective_calls_of_their_own_or_are_not_known() -> None:
    """One that waits alone in its group waits for the one that has gone astray."""
    stacks = dict(enumerate([REDUCE, REDUCE, REDUCE, BARRIER]))
    alone = blame_of(stacks)
    assert alone is not None
    assert (alone.rank, alone.certain) == (3, True)
    in_groups = blame_of(stacks, together=False)
    assert in_groups == Blame(
        None, f"ranks 0, 1 and 2 wait in {IN_REDUCE}, and rank 3 waits in {IN_BARRIER}", certain=False
    )
    part = blame_of(dict(enumerate([REDUCE, REDUCE, REDUCE, BARRIER, BARRIER])), whole=False)
    assert part is not None
    assert (part.rank, part.certain) == (None, False)
    two = blame_of({0: REDUCE, 1: BARRIER}, whole=False, together=False)
    assert two is not None
    assert not two.certain
    assert blame_of({0: READING, 1: READING}, whole=False) is None


@pytest.mark.parametrize(
    ("ranks", "parallelism", "one"),
    [
        (8, {}, True),
        (8, {"dataParallelShardDegree": 8}, True),
        (8, {"tensorParallelDegree": 8}, True),
        (8, {"tensorParallelDegree": 2}, False),
        (8, {"dataParallelShardDegree": 4}, False),
        (2, {"pipelineParallelDegree": 2}, False),
        (8, {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 4}}}, False),
    ],
    ids=str,
)
def test_all_ranks_are_in_the_same_calls_where_the_job_has_one_axis(
    ranks: int, parallelism: dict[str, Any], one: bool
) -> None:
    spec = a_job(workers={"replicas": ranks}, parallelism=parallelism).spec
    assert spec is not None
    assert in_one_group(spec) is one


def test_many_ranks_are_a_sentence_of_bounded_length() -> None:
    stacks = {rank: stack(*[f"torch/distributed/{rank % 40}.py:{'call' * 90}"] * 40) for rank in range(400)}
    found = blame_of(stacks)
    assert found is not None
    assert found.why.startswith("ranks 0, 40, 80, 120, 160, 200, 240, 280 and 2 more wait in callcall")
    assert found.why.endswith(", and 360 more elsewhere: they wait for each other")
    assert len(found.why) < 6000


def test_hostile_stacks_are_bounded_and_printable() -> None:
    endless = stack(*["/x\x1b[31m.py:f"] * 10_000)
    found = blame_of({0: endless, 1: REDUCE, 2: "\x00" * 10**6})
    assert found is not None
    assert found.why.isprintable()
    assert len(found.why.encode()) < 4000
