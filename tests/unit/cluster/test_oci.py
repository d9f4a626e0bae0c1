import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tools.cluster.oci import Layout
from tools.cluster.registry import served


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "layout")
    write(made, "pause", b"first")
    return made


def write(layout: Layout, name: str, content: bytes) -> None:
    layer = layout.folder.parent / "layer.tar"
    layer.write_bytes(content)
    layout.write(name, layer, {"Entrypoint": ["/pause"]})


def fetch(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}") as answer:
        return answer.read()


def test_pruning_removes_what_the_former_build_left(layout: Layout):
    former = layout.blobs_of("pause")
    write(layout, "pause", b"second")
    write(layout, "other", b"third")
    layout.prune()
    assert not any(layout.blob(digest).exists() for digest in former[:1])
    assert all(layout.blob(digest).exists() for name in ("pause", "other") for digest in layout.blobs_of(name))


@pytest.mark.parametrize(
    "path", ["/v2/disttrain/nothing/manifests/test", "/etc/passwd", "/v2/disttrain/pause/blobs/.."]
)
def test_a_registry_serves_nothing_else(layout: Layout, path: str):
    with served(layout) as address, pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(address, path)
