"""helm, built from source where it is missing."""

from pathlib import Path

import pytest

from tools.cluster import build


@pytest.fixture(scope="session")
def helm() -> Path:
    return build.ensure(["helm"])["helm"]
