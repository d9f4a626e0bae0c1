"""Worlds of tests/gpu: a case that breaks its world costs itself alone, and no world stands still for long."""

from types import SimpleNamespace

import pytest

from tests.gpu.worlds import NEW_WORLDS, run_each
from tests.unit.trainer import worlds
from tests.unit.trainer.worlds import World

CASES = {name: [] for name in ("first", "second", "third", "fourth")}


class Worlds:
    """Worlds that end in some of the cases, as an exception says that is raised there."""

    def __init__(self, breaks):
        self.breaks, self.begun, self.left = breaks, [], {}

    def run(self, folder, cases):
        self.begun.append(list(cases))
        self.left[folder] = {}
        for name in cases:
            if name in self.breaks:
                raise self.breaks[name]
            self.left[folder][name] = {"name": name}
        return self.left[folder]

    def finished(self, folder, names):
        return {name: result for name, result in self.left[folder].items() if name in names}


def crash():
    return AssertionError("a traceback\nRuntimeError: out of range")


def standstill():
    return pytest.fail.Exception("not all ranks ended in time\nstacks")


def results_of(tmp_path, breaks):
    begun = Worlds(breaks)
    return run_each(tmp_path, CASES, begun.run, begun.finished), begun


def test_where_nothing_breaks_there_is_one_world(tmp_path):
    results, begun = results_of(tmp_path, {})
    assert dict(results) == {name: {"name": name} for name in CASES}
    assert begun.begun == [list(CASES)]


@pytest.mark.parametrize(
    ("why", "message"), [(crash(), "in this case: RuntimeError: out"), (standstill(), "in this case: not all ranks")]
)
def test_a_world_that_breaks_has_failed_in_one_case_and_the_rest_goes_on_in_another(tmp_path, why, message):
    results, begun = results_of(tmp_path, {"second": why})
    assert begun.begun == [list(CASES), ["third", "fourth"]]
    assert [results[name]["name"] for name in ("first", "third", "fourth")] == ["first", "third", "fourth"]
    with pytest.raises(pytest.fail.Exception, match=message):
        results["second"]


def test_new_worlds_are_few(tmp_path):
    _, begun = results_of(tmp_path, dict.fromkeys(CASES, crash()))
    assert len(begun.begun) == 1 + NEW_WORLDS
    results, begun = results_of(tmp_path, dict.fromkeys(CASES, standstill()))
    assert len(begun.begun) == 2
    with pytest.raises(pytest.fail.Exception, match="not run: 2 worlds before it"):
        results["third"]


class Rank:
    """A process whose life goes on by a second whenever it is waited for."""

    pid = 1

    def __init__(self, clock, ends_at):
        self.clock, self.ends_at, self.signals = clock, ends_at, []

    def poll(self):
        return 0 if self.clock.now >= self.ends_at else None

    def wait(self, seconds):
        self.clock.now += seconds
        return self.poll()

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(worlds, "time", clock)
    return clock


def world_of(tmp_path, *ranks):
    for number in range(len(ranks)):
        (tmp_path / f"rank-{number}.out").touch()
        (tmp_path / f"rank-{number}.err").write_text(f"the stack of {number}")
    return World(tmp_path, list(ranks))


def test_a_world_may_take_long_as_long_as_it_gets_on(tmp_path, clock):
    world = world_of(tmp_path, Rank(clock, 100), Rank(clock, 90))
    assert len(world.ended(within=10, progress=lambda: clock.now // 8)) == 2


def test_a_world_that_does_not_get_on_is_ended_with_the_stacks_of_all(tmp_path, clock):
    ranks = Rank(clock, 100), Rank(clock, 90)
    with pytest.raises(pytest.fail.Exception, match=r"the stack of 0\nrank 1:\nthe stack of 1"):
        world_of(tmp_path, *ranks).ended(within=10, progress=lambda: clock.now >= 8)
    assert [len(rank.signals) for rank in ranks] == [1, 1]
