"""What holds for all tests: cheap ones first, and meanwhile the programs and images of the dear ones are built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# How long a case takes is the machine's affair.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

HERE = Path(__file__).parent
ORDER = ("unit", "gpu", "local", "integration", "e2e")
"""A mistake that a unit test finds should not wait for a cluster; and the cluster's programs are ready by then."""

_PREFETCH = pytest.StashKey[subprocess.Popen[bytes]]()


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(HERE).parts[0] if HERE in item.path.parents else ""
    return ORDER.index(folder) if folder in ORDER else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds images beside programs and the first tests, not behind them: the longest tests wait for both. What goes
    wrong is said by the fixture that needs the result."""
    wanted = any(_place(item) == ORDER.index("e2e") for item in session.items)
    if not wanted or session.config.option.collectonly or os.environ.get("KUBECONFIG"):
        return
    command = [sys.executable, "-m", "tests.cluster", "prefetch"]
    session.config.stash[_PREFETCH] = subprocess.Popen(
        command, cwd=HERE.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """A build that nobody waits for any more ends with the tests: by SIGTERM to its group, which is our own child's."""
    prefetch = config.stash.get(_PREFETCH, None)
    if prefetch is not None and prefetch.poll() is None:
        os.killpg(prefetch.pid, 15)
        prefetch.wait()
