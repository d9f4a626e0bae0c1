"""An API server that is played, as the current context of a kubeconfig."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.fake_api import FakeApi


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield fake
