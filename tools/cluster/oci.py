"""Images as a folder of content-addressed files (an OCI image layout): reading, writing and pruning it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE = "org.opencontainers.image.ref.name"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"

Json = Any


@dataclass(frozen=True)
class Layout:
    folder: Path

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def manifest_of(self, name: str) -> Json:
        """The descriptor of a named image's manifest; None if there is no such image."""
        for entry in self._index()["manifests"]:
            if entry.get("annotations", {}).get(REFERENCE) == name:
                return entry
        return None

    def blobs_of(self, name: str) -> Sequence[str]:
        """The digests of an image's layers and config."""
        entry = self.manifest_of(name)
        if entry is None:
            return []
        manifest = json.loads(self.blob(entry["digest"]).read_text())
        return [part["digest"] for part in (*manifest["layers"], manifest["config"])]

    def write(self, name: str, layer: Path, config: Json) -> None:
        """Adds an image of one uncompressed layer, a tar that is moved here."""
        layer_part = self._adopt(layer, _LAYER)
        platform = {"architecture": "amd64", "os": "linux"}
        rootfs = {"type": "layers", "diff_ids": [layer_part["digest"]]}
        config_part = self._write_json({**platform, "config": config, "rootfs": rootfs}, _CONFIG)
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config_part, "layers": [layer_part]}
        entry = {**self._write_json(manifest, MANIFEST), "annotations": {REFERENCE: name}, "platform": platform}
        others = [one for one in self._index()["manifests"] if one.get("annotations", {}).get(REFERENCE) != name]
        self._write_index([*others, entry])

    def prune(self) -> None:
        """Removes what no named image refers to any more: the layers of former builds."""
        kept = set(self._referenced())
        for blob in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{blob.name}" not in kept:
                blob.unlink()
        for unfinished in self.folder.glob("oci-put-blob*"):  # of a copy that was killed
            unfinished.unlink()

    def _referenced(self) -> Iterator[str]:
        for entry in self._index()["manifests"]:
            yield entry["digest"]
            yield from self.blobs_of(entry.get("annotations", {}).get(REFERENCE, ""))

    def _index(self) -> Json:
        try:
            return json.loads((self.folder / "index.json").read_text())
        except FileNotFoundError:
            return {"manifests": []}

    def _write_index(self, manifests: list[Json]) -> None:
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))

    def _write_json(self, content: Json, media_type: str) -> Json:
        fresh = self.folder / "fresh.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(content))
        return self._adopt(fresh, media_type)

    def _adopt(self, file: Path, media_type: str) -> Json:
        with file.open("rb") as stream:
            digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
        size = file.stat().st_size
        target = self.blob(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        return {"mediaType": media_type, "digest": digest, "size": size}
