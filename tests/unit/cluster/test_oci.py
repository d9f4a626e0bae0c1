import json
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


def test_a_written_image_is_found_by_name(layout: Layout):
    layer, config = layout.blobs_of("pause")
    assert layout.blob(layer).read_bytes() == b"first"
    assert json.loads(layout.blob(config).read_text())["rootfs"]["diff_ids"] == [layer]


def test_an_unknown_name_is_no_image(layout: Layout):
    assert layout.manifest_of("trainer") is None
    assert layout.blobs_of("trainer") == []


def test_pruning_removes_what_the_former_build_left(layout: Layout):
    former = layout.blobs_of("pause")
    write(layout, "pause", b"second")
    write(layout, "other", b"third")
    layout.prune()
    assert not any(layout.blob(digest).exists() for digest in former[:1])
    assert all(layout.blob(digest).exists() for name in ("pause", "other") for digest in layout.blobs_of(name))


def test_a_registry_serves_the_manifest_by_tag_and_its_blobs_by_digest(layout: Layout):
    with served(layout) as address:
        manifest = json.loads(fetch(address, "/v2/disttrain/pause/manifests/test"))
        assert fetch(address, f"/v2/disttrain/pause/blobs/{manifest['layers'][0]['digest']}") == b"first"
        by_digest = layout.manifest_of("pause")["digest"]
        assert json.loads(fetch(address, f"/v2/disttrain/pause/manifests/{by_digest}")) == manifest


@pytest.mark.parametrize(
    "path", ["/v2/disttrain/nothing/manifests/test", "/etc/passwd", "/v2/disttrain/pause/blobs/.."]
)
def test_a_registry_serves_nothing_else(layout: Layout, path: str):
    with served(layout) as address, pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(address, path)
