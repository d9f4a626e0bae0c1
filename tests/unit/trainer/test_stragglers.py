"""Ranks that are slow all the time are named, by what they work themselves, and nobody else ever is."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.report import SlowRank
from disttrain_trainer.metrics import stragglers
from disttrain_trainer.metrics.stragglers import WINDOW_SECONDS, WINDOWS, Stragglers, say

Own = Sequence[float]
ALIKE: Own = (0.5, 0.5, 0.5, 0.5)
SLOW: Own = (0.5, 0.5, 0.75, 0.5)


def named(lines: Iterable[Own], groups: Sequence[Sequence[int]] = (range(4),)) -> list[int | None]:
    """The rank that is named after each window, of one line and a hundred steps that take as long as the slowest rank,
    but a second at least. A line of the start comes before."""
    watch = Stragglers(groups)
    watch.take(ALIKE, 100, 100.0)
    found = []
    for own in lines:
        watch.take(own, 100, 100 * max(1.0, *own))
        found.append(watch.found.rank if watch.found is not None else None)
    return found


def test_a_rank_is_named_after_some_slow_windows_and_for_as_long_as_it_is_slow() -> None:
    windows = [SLOW] * (WINDOWS + 2) + [ALIKE] * (WINDOWS + 1)
    expected = [*[None] * (WINDOWS - 1), *[2] * (3 + WINDOWS - 1), None, None]
    assert named(windows) == expected


@pytest.mark.parametrize(
    ("own", "rank"),
    [
        ((0.5, 0.5, 0.66, 0.5), 2),
        ((0.5, 0.5, 0.64, 0.5), None),
        ((0.1, 0.9), 1),
        ((0.9, 0.1), 0),
        ((0.4, 0.4), None),
        ((0.7,), None),
        ((0.0, 0.0, 0.0), None),
        ((0.9, 0.9, 0.9, 0.2), None),
        ((0.2, 0.2, 0.9, 0.8, 0.2), 2),
        ((0.01, 0.01, 0.02), None),
    ],
    ids=[
        "a third more than the others",
        "a quarter more",
        "two ranks",
        "rank 0",
        "alike",
        "alone",
        "nothing to do",
        "one is fast",
        "the slowest of two",
        "twice as long, and a hundredth of a step",
    ],
)
def test_what_is_slow(own: Own, rank: int | None) -> None:
    assert named([own] * WINDOWS, [range(len(own))])[-1] == rank


@pytest.mark.parametrize(
    ("own", "rank"),
    [((0.2, 0.2, 0.8, 0.8), None), ((0.2, 0.2, 0.5, 0.8), 3), ((0.2, 0.8), None)],
    ids=["stages that differ", "a slow replica of the second stage", "stages of one rank"],
)
def test_stages_are_not_compared_with_each_other(own: Own, rank: int | None) -> None:
    groups = [range(len(own) // 2), range(len(own) // 2, len(own))]
    assert named([own] * WINDOWS, groups)[-1] == rank


@pytest.mark.parametrize(
    ("own", "pod", "rank"),
    [
        ((0.5, 0.5, 0.5, 0.9), 1, 3),
        ((0.5, 0.5, 0.9, 0.9), 1, None),
        ((0.5, 0.5, 0.8, 0.9), 1, None),
        ((0.5, 0.5, 0.8, 0.9), 2, 3),
    ],
    ids=["one", "one that waits for another", "two that differ little", "two of one pod"],
)
def test_of_ranks_that_may_wait_for_each_other_one_is_named_only_if_those_in_other_pods_are_not_slow(
    own: Own, pod: int, rank: int | None
) -> None:
    watch = Stragglers([range(4)], [[0, 1], [2, 3]], pod)
    watch.take(ALIKE, 100, 100.0)
    for _ in range(WINDOWS):
        watch.take(own, 100, 100.0)
    assert (None if watch.found is None else watch.found.rank) == rank


def test_it_is_counted_how_often_a_rank_was_slow_for_as_long_as_it_takes_to_name_it() -> None:
    watch = Stragglers([range(4)])
    lines = [SLOW] * 3 * WINDOWS + [ALIKE] + [SLOW] * WINDOWS + [ALIKE] * WINDOWS + [SLOW] * WINDOWS
    found = []
    for own in [ALIKE, *lines]:
        watch.take(own, 100, 100.0)
        found.append(0 if watch.found is None else watch.found.times)
    assert [found[WINDOWS * number] for number in (1, 2, 3)] == [1, 2, 3]
    assert found[4 * WINDOWS + 1] == 4, "a window in which it was not slow changes nothing"
    assert found[-1] == 1, "once it was no longer slow, all begins anew"


def test_the_rank_that_is_named_stays_while_another_one_is_slow_too() -> None:
    both = (0.5, 0.9, 0.75, 0.5, 0.5)
    first = [(0.5, 0.5, 0.75, 0.5, 0.5)] * WINDOWS
    found = named([*first, *[both] * WINDOWS, *[(0.5, 0.9, 0.5, 0.5, 0.5)] * WINDOWS], [range(5)])
    assert found[WINDOWS - 1 :] == [*[2] * (2 * WINDOWS), 1]


def test_the_first_line_with_its_compilation_counts_for_nothing() -> None:
    watch = Stragglers([range(4)])
    for _ in range(WINDOWS):
        watch.take(SLOW, 100, 100.0)
    assert watch.found is None
    assert watch.take(SLOW, 100, 100.0)
    assert watch.found == SlowRank(rank=2, seconds=0.75, others_seconds=0.5)


@pytest.mark.parametrize("steps", [1, 4])
def test_single_slow_lines_do_not_make_a_window_slow(steps: int) -> None:
    """A pause, such as a SIGSTOP, or a rank whose disk was busy, in one line of the log in each window."""
    watch = Stragglers([range(4)])
    lines = [(0.5, 0.5, 90.0, 0.5)] + [ALIKE] * (stragglers.WINDOW_STEPS - 1)
    for own in lines * 10:
        assert not watch.take(own, steps, WINDOW_SECONDS / 5)
    assert watch.found is None


def test_a_window_holds_few_of_its_lines() -> None:
    watch = Stragglers([range(4)])
    for _ in range(WINDOWS * 1000):
        watch.take(SLOW, 1, WINDOW_SECONDS / 900)
        assert len(watch._lines) <= 32
    assert watch.found is not None


def test_the_log_says_the_times() -> None:
    assert say(SlowRank(rank=3, seconds=0.412, others_seconds=0.2)) == (
        "rank 3 is slow: its own work takes 412 ms per step, and 200 ms (median) that of the others"
    )
    assert say(None) == "no rank is slower than the others any more"


ANY = st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 60.0]), min_size=4, max_size=4)
CALM = st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4)
WILD_WINDOW = st.lists(ANY, min_size=5, max_size=5)
CALM_WINDOW = st.tuples(CALM, CALM, CALM, ANY, ANY).flatmap(st.permutations)
ROUNDS = st.lists(st.tuples(*[WILD_WINDOW] * (WINDOWS - 1), CALM_WINDOW), max_size=6)


@given(ROUNDS, st.integers(0, 10))
def test_no_rank_is_named_unless_it_is_slow_in_window_after_window(
    rounds: list[tuple[list[Own], ...]], steps: int
) -> None:
    """Whatever happens in the others: in one window of each round most lines have all ranks alike."""
    watch = Stragglers([range(4)])
    watch.take(ALIKE, 1, 1.0)
    for line in (line for one in rounds for window in one for line in window):
        assert not watch.take(line, 1 + steps, WINDOW_SECONDS / 5)
        assert watch.found is None


@given(st.permutations(range(6)), st.floats(1.31, 50), st.lists(st.floats(0.9, 1.1), min_size=5, max_size=5))
def test_a_rank_that_is_slow_all_the_time_is_always_named(
    places: list[int], factor: float, others: list[float]
) -> None:
    own = [0.0] * 6
    for place, value in zip(places, [*others, 1.1 * factor], strict=True):
        own[place] = value
    assert named([own] * WINDOWS, [range(6)])[-1] == places[-1]
