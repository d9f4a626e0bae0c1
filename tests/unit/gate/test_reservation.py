"""Gangs that wait keep nodes from others for a while, never for ever; and get them in the end where jobs end at all."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_operator.gate.admit import BEHIND, WaitingGang
from disttrain_operator.gate.fit import NodeFacts
from disttrain_operator.gate.reservation import FIRST_PART, admit_in_period, period_at
from tests.suites import examples
from tests.unit.gate.test_place import GPU, gang, node

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LONGEST = timedelta(seconds=16_000)
FIRST = LONGEST / FIRST_PART

seconds = st.integers(0, 1_000_000).map(lambda number: timedelta(seconds=number))


def test_periods_are_equal_in_pairs_and_grow_up_to_the_longest() -> None:
    periods = []
    now = BEGIN
    for _ in range(14):
        period = period_at(BEGIN, now, LONGEST)
        periods.append((period.keeps, (period.until - now) / FIRST))
        now = period.until
    pairs = [(keeps, length) for length in (1, 2, 4, 8, 16, 16, 16) for keeps in (True, False)]
    assert periods == pairs


@settings(max_examples=examples(300), deadline=None)
@given(seconds)
def test_a_period_says_when_it_ends(waited: timedelta) -> None:
    now = BEGIN + waited
    period = period_at(BEGIN, now, LONGEST)
    assert now < period.until <= now + LONGEST
    last, after = period.until - timedelta(microseconds=1), period.until
    assert period_at(BEGIN, last, LONGEST) == period
    assert period_at(BEGIN, after, LONGEST).keeps != period.keeps


@settings(max_examples=examples(300), deadline=None)
@given(seconds, seconds)
def test_nodes_are_kept_for_half_of_the_time_and_a_period_at_most(waited: timedelta, observed: timedelta) -> None:
    """Red where periods grow beyond the longest."""
    now, kept = BEGIN + waited, timedelta()
    end = now + observed
    while now < end:
        period = period_at(BEGIN, now, LONGEST)
        length = min(period.until, end) - now
        kept += length if period.keeps else timedelta()
        now = period.until
    assert kept <= observed / 2 + LONGEST


def test_a_clock_that_was_set_back_begins_anew() -> None:
    period = period_at(BEGIN, BEGIN - timedelta(days=3), LONGEST)
    assert period.keeps
    assert period.until == BEGIN - timedelta(days=3) + FIRST


class Cluster:
    """Two nodes; jobs that run for some time, and gangs that wait."""

    def __init__(self) -> None:
        self.nodes = [node("a"), node("b")]
        self.now = BEGIN
        self.since: datetime | None = None
        self.waiting: dict[str, WaitingGang] = {}
        self.running: dict[str, tuple[datetime, dict[str, int]]] = {}
        """uid -> when it ends, GPUs by node."""
        self.lengths: dict[str, timedelta] = {}

    def run(self, uid: str, node: str, gpus: int, ends: timedelta) -> None:
        """A job that runs already."""
        self.running[uid] = (self.now + ends, {node: gpus})

    def wait(self, uid: str, pods: int, length: timedelta) -> None:
        """A gang that runs for so long; gangs of many pods are the older ones."""
        self.waiting[uid] = gang(uid, pods, age=pods, waiting_since=self.now)
        self.lengths[uid] = length

    def run_cycle(self) -> dict[str, str]:
        """Run one cycle: a gang that fits runs. Returns why the others wait."""
        self.running = {uid: job for uid, job in self.running.items() if job[0] > self.now}
        used: dict[str, dict[str, int]] = {}
        for _, taken in self.running.values():
            for name, gpus in taken.items():
                used.setdefault(name, {GPU: 0})[GPU] += gpus
        found = admit_in_period(
            self.waiting.values(), self.nodes, used, {}, waiting_since=self.since, now=self.now, longest=LONGEST
        )
        self.since = found.waiting_since
        for uid, outcome in found.outcomes.items():
            if outcome.placement is not None:
                taken = dict.fromkeys(outcome.placement.values(), 0)
                for name in outcome.placement.values():
                    taken[name] += 1
                self.running[uid] = (self.now + self.lengths[uid], taken)
                del self.waiting[uid]
        return {uid: outcome.why for uid, outcome in found.outcomes.items() if outcome.placement is None}


FOR_EVER = timedelta(days=10_000)


def test_a_gang_whose_room_never_comes_is_passed_in_turn_and_keeps_its_place() -> None:
    there = Cluster()
    there.run("weeks", "a", 8, FOR_EVER)
    there.wait("large", 16, FIRST)
    there.run_cycle()
    there.wait("small", 1, FIRST)
    assert there.run_cycle()["small"] == BEHIND
    there.now += FIRST
    assert list(there.run_cycle()) == ["large"]
    assert "small" in there.running
    there.running.pop("weeks")
    there.running.pop("small")
    there.wait("late", 1, FIRST)
    assert list(there.run_cycle()) == ["late"], "it is the first whenever there is room"


def test_gangs_that_are_deleted_and_made_again_keep_nodes_no_longer() -> None:
    """Each is new when it would have to let others pass."""
    there = Cluster()
    there.run("weeks", "a", 8, FOR_EVER)
    there.wait("small", 1, FIRST)
    passed = 0
    for number in range(64):
        uid = f"large-{number}"
        there.wait(uid, 16, FIRST)
        there.run_cycle()
        if "small" in there.running:
            passed += 1
            del there.running["small"]
            there.wait("small", 1, FIRST)
        there.waiting.pop(f"large-{number - 1}", None)
        there.now += FIRST
    assert passed >= 64 / 2 - FIRST_PART


def test_many_gangs_keep_nodes_no_longer_than_one() -> None:
    """They wait since different times."""
    there = Cluster()
    there.run("weeks", "a", 8, FOR_EVER)
    for number in range(10):
        there.wait(f"large-{number}", 16, FIRST)
        there.run_cycle()
        there.now += FIRST / 10
    there.wait("small", 1, FIRST)
    there.run_cycle()
    assert "small" in there.running


def test_a_new_process_goes_on_in_the_period_of_the_former_one() -> None:
    there = Cluster()
    there.run("weeks", "a", 8, FOR_EVER)
    there.wait("large", 16, FIRST)
    there.run_cycle()
    there.now += FIRST
    there.since = None
    there.wait("small", 1, FIRST)
    assert list(there.run_cycle()) == ["large"], "others pass in this period, whatever process decides"


def test_periods_are_over_when_nobody_waits() -> None:
    there = Cluster()
    there.run("short", "a", 8, FIRST * 3)
    there.wait("large", 16, FIRST)
    there.run_cycle()
    assert there.since == BEGIN
    there.now += FIRST * 3
    there.run_cycle()
    assert "large" in there.running
    assert there.since is None


def test_a_gang_that_no_end_of_a_job_would_help_begins_no_period() -> None:
    there = Cluster()
    there.wait("huge", 17, FIRST)
    there.wait("small", 1, FIRST)
    assert list(there.run_cycle()) == ["huge"]
    assert there.since is None


@pytest.mark.parametrize("length", [FIRST / 2, FIRST, FIRST * 3, FIRST * 10, LONGEST])
def test_a_large_gang_gets_its_room_beside_an_endless_stream_of_small_ones(length: timedelta) -> None:
    """Whose jobs end within the longest period."""
    there = Cluster()
    for number in range(16):
        there.run(f"first-{number}", "ab"[number % 2], 1, length * (number + 1) / 16)
    there.wait("large", 16, length)
    for number in range(2000):
        there.run_cycle()
        if "large" in there.running:
            break
        there.now += FIRST / 4
        for extra in range(2):
            there.wait(f"small-{number:04}-{extra}", 1, length)
    assert "large" in there.running
    waited = there.now - BEGIN
    assert waited <= 8 * max(length, FIRST), "a few times as long as a job takes"


def test_the_nodes_need_not_be_looked_at_twice() -> None:
    """Equal arguments, equal answers."""
    nodes: list[NodeFacts] = [node("a")]
    gangs = [gang("one", 16, age=10, waiting_since=BEGIN), gang("two", 1, waiting_since=BEGIN)]
    cycles = [
        admit_in_period(gangs[::step], nodes, {}, {}, waiting_since=BEGIN, now=BEGIN + FIRST, longest=LONGEST)
        for step in (1, -1)
    ]
    assert cycles[0] == cycles[1]
