from pathlib import Path

import pytest

from tools.cluster.oci import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "layout")
    write(made, "pause", b"first")
    return made


def write(layout: Layout, name: str, content: bytes) -> None:
    layer = layout.folder.parent / "layer.tar"
    layer.write_bytes(content)
    layout.write(name, layer, {"Entrypoint": ["/pause"]})


def test_pruning_removes_what_the_former_build_left(layout: Layout):
    former = layout.blobs_of("pause")
    write(layout, "pause", b"second")
    write(layout, "other", b"third")
    layout.prune()
    assert not any(layout.blob(digest).exists() for digest in former[:1])
    assert all(layout.blob(digest).exists() for name in ("pause", "other") for digest in layout.blobs_of(name))
