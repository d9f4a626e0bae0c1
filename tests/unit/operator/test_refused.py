"""A full namespace with thousands of jobs: what is asked is bounded, and everybody gets in."""

import heapq
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_operator.refused import FEW, WOKEN_AT_ONCE, WORKERS_IN_A_CROWD, Refused
from disttrain_operator.snapshot import Key
from tests.suites import examples


def a_key(number: int, namespace: str = "full") -> Key:
    return Key(namespace, f"job-{number}", f"uid-{namespace}-{number}")


class Namespace:
    """A quota on pods, and jobs of some pods each that keep those which they have got."""

    def __init__(self, room: int, sizes: list[int]) -> None:
        self.room = room
        self.awake: deque[Key] = deque()
        self.refused = Refused()
        self.wanted = {a_key(number): size for number, size in enumerate(sizes)}
        self.got = Counter[Key]()
        self.tries = Counter[Key]()
        for key in self.wanted:
            self.awake.append(key)
        self.work()

    def work(self) -> None:
        """All that were woken try."""
        while self.awake:
            key = self.awake.popleft()
            self.tries[key] += 1
            taken = min(self.room, self.wanted[key] - self.got[key])
            self.room -= taken
            self.got[key] += taken
            if self.got[key] == self.wanted[key]:
                self.awake.extend(self.refused.served(key))
            else:
                self.refused.again(key, 1)

    def end_one(self) -> bool:
        """A job that runs ends, and with it its pods."""
        running = [key for key, size in self.wanted.items() if self.got[key] == size]
        if not running:
            return False
        size = self.wanted.pop(running[0])
        for _ in range(size):
            self.room += 1
            self.awake.extend(self.refused.freed("full"))
        self.work()
        return True


@pytest.mark.parametrize("jobs", [100, 10_000])
def test_a_pod_that_goes_costs_a_few_tries_however_many_wait(jobs: int) -> None:
    there = Namespace(1, [1] * jobs)
    before = there.tries.total()
    there.end_one()
    # The few that are woken; one of them gets in and wakes the next few, who find nothing.
    assert there.tries.total() - before <= 2 * WOKEN_AT_ONCE


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(4, 9))
def test_everybody_gets_in_without_a_back_off_as_room_becomes_free(sizes: list[int], room: int) -> None:
    """Where no job keeps a part of what it wants: with back-offs alone, each would be in after some."""
    there = Namespace(room, sizes)
    ended = 0
    while there.end_one():
        ended += 1
    held = sum(there.got[key] for key in there.wanted)
    assert ended == len(sizes) or held == room, "the rest wait for each other's parts, not for a turn"
    assert there.tries.total() <= len(sizes) + 2 * WOKEN_AT_ONCE * (sum(sizes) + len(sizes))


def test_who_was_woken_in_vain_waits_behind_the_others() -> None:
    refused = Refused()
    for number in range(5):
        refused.again(a_key(number), 1)
    woken = [key for _ in range(3) for key in refused.freed("full")]
    assert [key.name for key in woken] == ["job-0", "job-1", "job-2", "job-3", "job-4", "job-0"]


def test_room_of_one_namespace_wakes_nobody_elsewhere() -> None:
    refused = Refused()
    refused.again(a_key(1, "other"), 1)
    assert not refused.freed("full")


def test_the_more_wait_the_longer_each_waits() -> None:
    """Ten tries a second at most, however many wait."""
    refused = Refused()
    waits = [refused.again(a_key(number), 1) for number in range(10_000)]
    assert waits == sorted(waits)
    assert waits[0] == 0
    assert waits[100] == pytest.approx(10)
    assert waits[-1] == pytest.approx(999.9)
    assert refused.again(a_key(1, "other"), 1) == 0, "namespaces do not count together"


def test_a_job_lets_others_go_first_until_its_time_comes_or_it_is_woken_or_has_another_spec() -> None:
    now = [100.0]
    refused = Refused(clock=lambda: now[0])
    for number in range(50):
        refused.again(a_key(number), 1)
    last = a_key(49)
    assert refused.seconds_left(a_key(0), 1) == 0, "it was alone"
    assert refused.seconds_left(last, 1) == pytest.approx(4.9)
    assert refused.seconds_left(last, 2) == 0
    assert refused.seconds_left(a_key(50), 1) == 0, "it was not refused anything"
    now[0] += 3
    assert refused.seconds_left(last, 1) == pytest.approx(1.9)
    for _ in range(25):
        refused.freed("full")
    assert refused.seconds_left(last, 1) == 0
    refused.again(last, 1)
    now[0] += 4.9
    assert refused.seconds_left(last, 1) == pytest.approx(0)


def test_a_job_that_waits_alone_waits_for_nobody() -> None:
    """Red where it is paced by its own last try."""
    refused = Refused(clock=lambda: 100.0)
    for _ in range(3):
        refused.again(a_key(0), 1)
        assert refused.seconds_left(a_key(0), 1) == 0


@pytest.mark.parametrize("jobs", [100, 6000])
def test_of_those_whose_times_have_passed_each_tries_once_and_ten_a_second_try(jobs: int) -> None:
    """They waited for a worker meanwhile. Red where who comes too soon gets no time of its own."""
    now = [0.0]
    refused = Refused(clock=lambda: now[0])
    for number in range(jobs):
        refused.again(a_key(number), 1)
    began = now[0] = 2000.0
    due = [(began, number) for number in range(jobs)]
    tried: list[int] = []
    looks = 0
    while due:
        now[0], number = heapq.heappop(due)
        looks += 1
        left = refused.seconds_left(a_key(number), 1)
        if left:
            heapq.heappush(due, (now[0] + left + 1e-9, number))
        else:
            tried.append(number)
            assert len(tried) <= (now[0] - began) * 10 + 1.01
    assert sorted(tried) == list(range(jobs))
    assert now[0] - began <= jobs / 10
    assert looks <= 2 * jobs, "who waits is not looked at meanwhile"


def test_what_is_served_or_gone_is_not_kept() -> None:
    refused = Refused()
    for number in range(3):
        refused.again(a_key(number), 1)
    assert not refused.served(a_key(7)), "it had not been refused anything"
    refused.forget(a_key(0))
    assert refused.served(a_key(1)) == [a_key(2)]
    assert not refused.served(a_key(2))
    assert refused.count == 0
    assert not refused.freed("full")


@pytest.mark.parametrize("workers", [1, 2, 64])
def test_a_crowded_namespace_has_few_workers_until_few_wait_there(workers: int) -> None:
    refused = Refused()
    usual = refused.share("full", workers)
    for number in range(FEW):
        refused.again(a_key(number), 1)
    assert refused.share("full", workers) == usual
    refused.again(a_key(FEW), 1)
    assert refused.share("full", workers) == min(usual, WORKERS_IN_A_CROWD)
    assert refused.share("other", workers) == usual
    refused.served(a_key(0))
    assert refused.share("full", workers) == usual
