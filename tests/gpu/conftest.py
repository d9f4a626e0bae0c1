"""One GPU. Each test says by `gpu_path` what it shows to run; `make gpu` writes that into docs/gpu.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from benchmarks.gpu_table import OUTCOMES, PATHS
from tests.gpu.worlds import AT_ONCE, DEVICE, FIRST, STARTS

HERE = Path(__file__).parent
WHY_NOT = "torch.cuda.is_available() is false: no GPU here, or a torch without CUDA"
GPU_ONLY = "this is about a GPU, and DISTTRAIN_GPU_TESTS_DEVICE is cpu"
Key = tuple[str, str]
BEGUN = pytest.StashKey[dict[Key, "Future[Any]"]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    selected = [item for item in items if HERE in item.path.parents]
    for item in selected:
        item.add_marker(pytest.mark.gpu)
        # It may wait for its worlds, which have limits of their own.
        item.add_marker(pytest.mark.timeout(420))
        paths = [path for mark in item.iter_markers("gpu_path") for path in mark.args]
        if unknown := set(paths) - PATHS.keys():
            raise pytest.UsageError(f"{item.nodeid}: gpu_path {unknown} is none of benchmarks/gpu_table.py's PATHS")
        # Reports keep properties, not markers.
        item.user_properties += [("gpu_path", path) for path in paths]
        if DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
        if DEVICE == "cpu" and item.get_closest_marker("gpu_only"):
            item.add_marker(pytest.mark.skip(reason=GPU_ONLY))
    for item in selected:
        if not _is_skipped(item):
            _write({"test": _name(item.nodeid), "paths": _paths(item)})


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run tests in the order in which their worlds end: what is known is written while another world stands still."""
    if session.config.option.collectonly or session.testsfailed or hasattr(session.config, "workerinput"):
        return None
    if not session.items or any(HERE not in item.path.parents for item in session.items):
        return None
    left = list(session.items)
    with TemporaryDirectory() as folder, _worlds(left, Path(folder)) as session.stash[BEGUN]:
        while left:
            item = first_known(left, session.stash[BEGUN])
            left.remove(item)
            # Which test comes next is not known yet: all is left behind but what is the session's.
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=session if left else None)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def first_known(items: Sequence[pytest.Item], worlds: Mapping[Key, Future[Any]]) -> pytest.Item:
    """Return the first test whose world has ended, or that has none, once there is one."""
    keys = {item: _key(item) for item in items}
    waiting = {item: worlds[key] for item, key in keys.items() if key in worlds}
    if len(waiting) == len(items):
        wait(waiting.values(), return_when=FIRST_COMPLETED)
    return next(item for item in items if item not in waiting or waiting[item].done())


@contextmanager
def _worlds(items: Iterable[pytest.Item], folder: Path) -> Iterator[dict[Key, Future[Any]]]:
    """The worlds of the tests that will run."""
    wanted = [key for item in items if not _is_skipped(item) and (key := _key(item)) is not None]
    keys = sorted(dict.fromkeys(wanted), key=lambda key: key not in FIRST)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {key: pool.submit(STARTS[key], _made(folder / str(number))) for number, key in enumerate(keys)}
        pool.shutdown(cancel_futures=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Key, Future[Any]]]:
    """The worlds of all tests that will run."""
    if BEGUN in request.session.stash:
        yield request.session.stash[BEGUN]
        return
    with _worlds(request.session.items, tmp_path_factory.mktemp("worlds")) as worlds:
        yield worlds


@pytest.fixture
def world(request: pytest.FixtureRequest, begun: dict[Key, Future[Any]]) -> Any:
    """What the worlds of the test's `gpu_world` have computed; fails as they did."""
    key = _key(request.node)
    assert key is not None, f"{request.node.nodeid} has no gpu_world"
    return begun[key].result()


def _key(item: pytest.Item) -> Key | None:
    """None for a test without `gpu_world`."""
    mark = item.get_closest_marker("gpu_world")
    return (item.module.__name__, mark.args[0]) if mark is not None and isinstance(item, pytest.Function) else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if Path(report.fspath).parent.name != HERE.name or (report.passed and report.when != "call"):
        return
    outcome = {"test": _name(report.nodeid), "paths": _paths(report), "outcome": report.outcome}
    _write({**outcome, "seconds": round(report.duration, 1), "why": report.longreprtext if report.failed else ""})


def _is_skipped(item: pytest.Item) -> bool:
    """Whether that is certain before it runs."""
    return any(mark.name == "skip" or mark.args[:1] == (True,) for mark in item.iter_markers() if "skip" in mark.name)


def _name(nodeid: str) -> str:
    """Without the file."""
    return nodeid.partition("::")[2]


def _paths(of: pytest.Item | pytest.TestReport) -> list[str]:
    return [str(value) for name, value in of.user_properties if name == "gpu_path"]


def _write(entry: dict[str, Any]) -> None:
    if file := os.environ.get(OUTCOMES):
        with Path(file).open("a") as opened:
            opened.write(json.dumps(entry) + "\n")
