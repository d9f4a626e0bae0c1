"""Whatever the rules allow trains: it ends, what is synchronous equals one process, and a stop changes no bit."""

import random

import pytest

from tests.soak import SOAK
from tests.unit.trainer.any_job import ASKED_AFTER, STOPPED_AFTER, any_jobs
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

RANKS = (2, 3, 4) if SOAK else (2, 4)
# There are 25 techniques.
COUNT = 75 if SOAK else 4
# A world keeps the groups of all its jobs, and their threads: with those of 72 each of four ranks had 1,300, and crept.
JOBS_PER_WORLD = 12
SEED = random.randrange(1_000_000) if SOAK else 1
JOBS = {
    f"{ranks} ranks, job {number}": drawn
    for ranks in RANKS
    for number, drawn in enumerate(any_jobs(SEED + ranks, ranks, COUNT))
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for ranks in RANKS:
        names = [name for name in JOBS if name.startswith(f"{ranks} ")]
        for first in range(0, len(names), JOBS_PER_WORLD):
            part = names[first : first + JOBS_PER_WORLD]
            cases = {f"{name}, whole": [JOBS[name].run()] for name in part}
            cases |= {f"{name}, stopped": [JOBS[name].run(stop_after=STOPPED_AFTER), JOBS[name].run()] for name in part}
            cases |= {f"{name}, asked": [JOBS[name].run(ask_after=ASKED_AFTER)] for name in part}
            found |= run_cases(tmp_path_factory.mktemp(f"ranks-{ranks}"), ranks, cases)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = {name: [drawn.alone] for name, drawn in JOBS.items() if drawn.synchronous}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


def refused(result):
    """Whether all runs ended with what only the model itself shows: a size that does not divide, too few layers."""
    return all(error is not None and error.startswith("InvalidConfiguration: ") for error in result["errors"])


@pytest.mark.parametrize("name", JOBS)
def test_it_ends_or_is_refused(results, name):
    whole = results[f"{name}, whole"]
    assert whole["errors"] == [None] or refused(whole), JOBS[name]


def test_most_are_not_refused(results):
    assert sum(refused(results[f"{name}, whole"]) for name in JOBS) < len(JOBS) / 3


@pytest.mark.parametrize("name", [name for name in JOBS if JOBS[name].synchronous])
def test_it_computes_what_one_process_computes(results, alone, name):
    whole = results[f"{name}, whole"]
    if not refused(whole):
        require_same(whole["parameters"], alone[name]["parameters"], 1e-9)


@pytest.mark.parametrize("name", JOBS)
def test_a_stop_changes_no_bit(results, name):
    stopped = results[f"{name}, stopped"]
    if refused(stopped):
        return
    assert stopped["errors"][1] is None, JOBS[name]
    assert "its checkpoint is written" in stopped["errors"][0]
    require_same(stopped["parameters"], results[f"{name}, whole"]["parameters"], 0.0)


@pytest.mark.parametrize("name", JOBS)
def test_a_checkpoint_that_is_asked_for_changes_no_bit(results, name):
    asked = results[f"{name}, asked"]
    if refused(asked):
        return
    assert asked["errors"] == [None], JOBS[name]
    # What must be drained for it, goes some steps on.
    if not JOBS[name].drains:
        assert ASKED_AFTER in asked["saved"], JOBS[name]
        require_same(asked["parameters"], results[f"{name}, whole"]["parameters"], 0.0)
