"""Worlds of the tests of a GPU: what one case breaks costs that case alone, and a world that stands still says where.

What a test looks at is computed by the worlds of its `gpu_world`, which its module starts by a function that is marked
with `worlds_of`. Those of all tests begin with the first one, several at a time, and a test that asks for the fixture
`world` waits for its own. pytest-xdist would share them out only by module.

A world that dies, or that finishes no case for a while, has failed in the first case that it did not finish; those that
it had finished count, and the others are run in a new world, of which there are few.

DISTTRAIN_GPU=all runs every layout instead of one or two for each technique. DISTTRAIN_GPU_TESTS_DEVICE=cpu runs all
but what needs a GPU on the CPU, to try the tests themselves out.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.unit.trainer.worlds import Ended, Patience, World, finished_cases, run_cases

T = TypeVar("T")
Cases = dict[str, list[dict[str, Any]]]
Found = dict[str, dict[str, Any]]

DEVICE = os.environ.get("DISTTRAIN_GPU_TESTS_DEVICE", "cuda")
EVERYTHING = os.environ.get("DISTTRAIN_GPU") == "all"
# The first case has the start of CUDA besides; a case itself takes seconds.
AT_ONCE = 6 if DEVICE == "cuda" else 1
"""A GPU has room for many small worlds, whose start is the work of the host's cores."""
PATIENCE = Patience(seconds=90.0, of_one=True, after_failure=15.0)
NEW_WORLDS = 3
"""As many as begin after one has died; one that stood still, which takes longer, counts twice."""
_SHOWN = 20_000

Start = Callable[[Path], Any]
"""Runs worlds in a folder and returns what they have computed."""
STARTS: dict[tuple[str, str], Start] = {}
"""By module and `gpu_world`."""
FIRST: set[tuple[str, str]] = set()
"""Those that take the longest."""


def worlds_of(name: str, *, first: bool = False) -> Callable[[Start], Start]:
    """Make a function the start of the worlds `name` of its module; first: they begin before all others."""

    def register(start: Start) -> Start:
        key = (start.__module__, name)
        STARTS[key] = start
        if first:
            FIRST.add(key)
        return start

    return register


class Results(Mapping[str, Any]):
    """Results of cases by name; to ask for one that failed fails the test that asks."""

    def __init__(self, found: Mapping[str, Any], failed: Mapping[str, str]) -> None:
        self._found, self._failed = found, failed

    def __getitem__(self, name: str) -> Any:
        if name in self._failed:
            pytest.fail(self._failed[name], pytrace=False)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._found, **self._failed})

    def __len__(self) -> int:
        return len({*self._found, *self._failed})


def run_each(
    folder: Path, cases: Cases, run: Callable[[Path, Cases], Found], finished: Callable[[Path, Iterable[str]], Found]
) -> Results:
    """Results of all cases, in as many worlds as that takes.

    run: runs cases in one world, in a folder. finished: the results that a world has left in its folder.
    """
    found: Found = {}
    failed: dict[str, str] = {}
    worlds, left = 0, NEW_WORLDS
    while (rest := {name: runs for name, runs in cases.items() if name not in {**found, **failed}}) and left >= 0:
        at, worlds = folder / f"world-{worlds}", worlds + 1
        try:
            found |= run(at, rest)
        # What pytest.fail raises is no Exception.
        except (Exception, pytest.fail.Exception) as error:
            found |= finished(at, rest)
            left -= 2 if isinstance(error, pytest.fail.Exception) else 1
            unfinished = [name for name in rest if name not in found]
            # All are finished where a world fails in leaving.
            failed |= dict.fromkeys(unfinished[:1], f"in this case: {_gist(error)}\n{str(error)[-_SHOWN:]}")
    return Results(found, failed | dict.fromkeys(rest, f"not run: {worlds} worlds before it died or stood still"))


def _gist(error: BaseException) -> str:
    """One line: that a world stood still comes first, what a rank has raised comes last."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0 if isinstance(error, pytest.fail.Exception) else -1]


def run_on_gpu(folder: Path, ranks: int, cases: Cases, device: str = DEVICE) -> Results:
    """Each case by so many ranks that share the GPU."""
    return run_each(folder, cases, lambda at, some: run_cases(at, ranks, some, PATIENCE, device=device), finished_cases)


def run_servers_on_gpu(folder: Path, ranks: int, cases: Cases, ranks_per_pod: int = 1) -> Results:
    """Each case by so many ranks of workers that share the GPU. Skips the test where there is no ZeroMQ."""
    pytest.importorskip("zmq")
    # Not above: whoever lacks it can run all other tests.
    from tests.unit.trainer.server_cases import finished_server_cases, run_server_cases

    return run_each(
        folder,
        cases,
        lambda at, some: run_server_cases(at, ranks, some, ranks_per_pod, DEVICE, PATIENCE),
        lambda at, some: finished_server_cases(at, ranks, some),
    )


def ended(world: World) -> list[Ended]:
    """Wait for all ranks, and not for long."""
    return world.ended(PATIENCE.seconds, PATIENCE.after_failure)


def beside_each_other(*starts: Callable[[], T]) -> list[T]:
    """What each of them returns."""
    with ThreadPoolExecutor(len(starts) if DEVICE == "cuda" else 1) as pool:
        return [future.result() for future in [pool.submit(start) for start in starts]]
