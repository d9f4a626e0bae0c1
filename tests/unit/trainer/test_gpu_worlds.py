"""Worlds of tests/gpu: a case that breaks its world costs itself alone."""

from concurrent.futures import Future

import pytest

from tests.gpu import conftest
from tests.gpu.worlds import run_each

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


@pytest.mark.parametrize(
    ("why", "message"), [(crash(), "in this case: RuntimeError: out"), (standstill(), "in this case: not all ranks")]
)
def test_a_world_that_breaks_has_failed_in_one_case_and_the_rest_goes_on_in_another(tmp_path, why, message):
    results, begun = results_of(tmp_path, {"second": why})
    assert begun.begun == [list(CASES), ["third", "fourth"]]
    assert [results[name]["name"] for name in ("first", "third", "fourth")] == ["first", "third", "fourth"]
    with pytest.raises(pytest.fail.Exception, match=message):
        results["second"]


class Item:
    """A test and its world."""

    def __init__(self, key):
        self.key = key


def test_the_first_test_is_one_whose_world_has_ended(monkeypatch):
    monkeypatch.setattr(conftest, "_key", lambda item: item.key)
    stands, ends = Future(), Future()
    worlds = {"stands": stands, "ends": ends}
    waiting, second, third, alone = Item("stands"), Item("ends"), Item("ends"), Item(None)
    assert conftest.first_known([waiting, alone], worlds) is alone
    ends.set_result("all well")
    assert conftest.first_known([waiting, second, third], worlds) is second
    stands.set_exception(RuntimeError("it stood still"))
    assert conftest.first_known([waiting], worlds) is waiting
