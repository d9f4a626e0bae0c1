"""Ranks that are behind in the calls of a group are named where their stacks say nothing, and never against these."""

import pytest

from disttrain_api.flight_recorder import Collective
from disttrain_api.stacks import STOPPED, with_collectives
from disttrain_operator.decide.collectives import behind, where_groups_are
from disttrain_operator.decide.stacks import blame_of

from .test_stacks import BACKWARD, BARRIER, FORWARDS, LOADING, REDUCE


def at(number: int, pending: str = "", group: str = "0", transfer: bool = False) -> list[Collective]:
    """The last call of a group."""
    return [Collective(group, "", number, "gloo:all_reduce", "8", pending == "waits", transfer)]


WAITS, DONE = at(5, "waits"), at(4)


def texts(stack: str, *calls: list[Collective]) -> dict[int, str]:
    return {rank: with_collectives(stack, of_rank) for rank, of_rank in enumerate(calls)}


@pytest.mark.parametrize(
    ("calls", "ranks"),
    [
        ((WAITS, DONE), [1]),
        ((DONE, WAITS, WAITS), [0]),
        ((WAITS, DONE, WAITS, DONE, WAITS), [1, 3]),
        ((WAITS, at(4, "waits"), WAITS), [1]),
    ],
    ids=["one of two", "one of three", "two of five", "one that waits in an earlier call"],
)
def test_those_who_have_begun_fewer_calls_are_behind(calls: tuple[list[Collective], ...], ranks: list[int]) -> None:
    found = behind(texts(BACKWARD, *calls))
    assert found is not None
    assert (found.ranks, found.call.number) == (ranks, 5)


@pytest.mark.parametrize(
    "calls",
    [
        (WAITS, WAITS),
        (at(5), DONE),
        (WAITS, DONE, DONE),
        (WAITS, DONE, WAITS, DONE),
        (WAITS, []),
        ([], []),
        (WAITS + at(1, group="1"), DONE + at(2, "waits", group="1")),
        (WAITS + at(1, group="1"), DONE + at(1, "waits", group="1")),
        (WAITS, DONE + at(1, "waits", group="tp"), WAITS),
        (WAITS, DONE + at(1, "waits", transfer=True)),
        (at(3, "waits") + at(5), DONE),
    ],
    ids=[
        "all wait", "none waits", "most", "half", "one does not say", "none says", "each in its own group",
        "in one group all wait", "in a smaller group", "a transfer", "the others wait in a former call",
    ],
)  # fmt: skip
def test_nobody_is_behind_where_the_calls_do_not_say_so_for_certain(calls: tuple[list[Collective], ...]) -> None:
    assert behind(texts(BACKWARD, *calls)) is None
    assert blame_of(texts(BACKWARD, *calls)) == blame_of(dict.fromkeys(range(len(calls)), BACKWARD))


def test_one_that_is_behind_is_named_where_all_stacks_are_alike() -> None:
    blame = blame_of(texts(BACKWARD, WAITS, DONE, WAITS, DONE, WAITS))
    assert blame is not None
    assert (blame.rank, blame.certain, blame.awaited) == (1, False, False)
    assert blame.why.startswith(
        "has not begun call 5: gloo:all_reduce of 8 in group 0, nor has rank 3, and ranks 0, 2 and 4 wait in it:"
        " it is in _engine_run_backward (graph.py:7) < "
    )
    assert blame_of(texts(BACKWARD, WAITS, DONE), whole=False) is None
    assert blame_of(texts(FORWARDS, WAITS, DONE)) is None


@pytest.mark.parametrize(
    "stacks",
    [
        [STOPPED, REDUCE], [LOADING, REDUCE, REDUCE], [REDUCE, BARRIER], [BARRIER, REDUCE, REDUCE],
    ],
    ids=["stopped", "reads", "wait for each other", "astray"],
)  # fmt: skip
def test_what_the_stacks_say_stays(stacks: list[str]) -> None:
    calls = [WAITS if rank == 0 else DONE for rank in range(2)] if len(stacks) == 2 else [WAITS, WAITS, DONE]
    told = {rank: text if text == STOPPED else with_collectives(text, calls[rank]) for rank, text in enumerate(stacks)}
    assert blame_of(told) == blame_of(dict(enumerate(stacks))) is not None


def test_where_groups_are_is_one_sentence() -> None:
    found = where_groups_are(texts(BACKWARD, WAITS, DONE, WAITS))
    assert found == (
        "by torch's flight recorder in group 0 ranks 0 and 2 wait in call 5: gloo:all_reduce of 8, rank 1 has done"
        " call 4: gloo:all_reduce of 8"
    )
    assert where_groups_are(texts(BACKWARD, DONE, DONE)) == where_groups_are({0: STOPPED}) == ""
    many = texts(BACKWARD, *(at(rank, "waits") + at(rank, "waits", group="1") for rank in range(1, 500)))
    assert len(where_groups_are(many)) < 600
