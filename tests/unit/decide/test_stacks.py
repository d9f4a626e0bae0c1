"""Stacks are told as one line, and name the rank that does something else than those that wait for it."""

import pytest

from disttrain_api.report import STOPPED
from disttrain_operator.decide.stacks import blame_of, main_stack

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
        [], [SILENT], [SILENT, SILENT], [STOPPED, STOPPED], [REDUCE], [REDUCE, REDUCE], [LOADING, LOADING],
        [BARRIER, REDUCE], [BARRIER, BARRIER, REDUCE, REDUCE], [BARRIER, REDUCE, COUNTS],
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


def test_hostile_stacks_are_bounded_and_printable() -> None:
    endless = stack(*["/x\x1b[31m.py:f"] * 10_000)
    found = blame_of({0: endless, 1: REDUCE, 2: "\x00" * 10**6})
    assert found is not None
    assert found.why.isprintable()
    assert len(found.why.encode()) < 4000
