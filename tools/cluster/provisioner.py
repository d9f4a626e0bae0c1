"""Makes a folder of the machine a volume for every claim of class `disttrain-shared`, and removes it with the claim.

The nodes share a machine, so a hostPath is storage that many nodes may write. Kubernetes' own hostPath provisioner
makes folders that only root may use, and fsGroup does not apply to hostPath: a pod that runs as another user is
refused. Hence this one, whose folders have mode 0777.

    python -m tools.cluster.provisioner URL FOLDER_OF_CERTIFICATES FOLDER_FOR_VOLUMES
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.cluster.api import ApiClient, Json
from tools.cluster.certificates import Certificate
from tools.cluster.errors import ClusterError

CLASS = "disttrain-shared"
PROVISIONER = "disttrain.io/test-cluster"
_CLAIMS, _VOLUMES = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"


def ensure_class(api: ApiClient) -> None:
    """It is the default, as a cluster of a user has one."""
    name = {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    api.ensure("/apis/storage.k8s.io/v1/storageclasses", {"metadata": name, "provisioner": PROVISIONER})


def unserved(claims: Json) -> Sequence[Json]:
    def waits(claim: Json) -> bool:
        spec = claim["spec"]
        return spec.get("storageClassName") == CLASS and not spec.get("volumeName") and not _leaving(claim)

    return [claim for claim in claims["items"] if waits(claim)]


def released(volumes: Json) -> Sequence[str]:
    return [
        volume["metadata"]["name"]
        for volume in volumes["items"]
        if volume["spec"].get("storageClassName") == CLASS and volume.get("status", {}).get("phase") == "Released"
    ]


def volume_for(claim: Json, folder: Path) -> Json:
    metadata, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{metadata['uid']}"
    return {
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Delete",
            "accessModes": spec["accessModes"],
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "hostPath": {"path": str(folder / name), "type": "Directory"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }


def _leaving(thing: Json) -> bool:
    return "deletionTimestamp" in thing["metadata"]


def serve_once(api: ApiClient, folder: Path) -> None:
    for claim in unserved(api.get(_CLAIMS)):
        volume = volume_for(claim, folder)
        shared = Path(volume["spec"]["hostPath"]["path"])
        shared.mkdir(parents=True, exist_ok=True)
        shared.chmod(0o777)
        api.ensure(_VOLUMES, volume)
    for name in released(api.get(_VOLUMES)):
        shutil.rmtree(folder / name, ignore_errors=True)
        api.ask("DELETE", f"{_VOLUMES}/{name}")


def main() -> None:
    url, certificates, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    admin = Certificate(certificates / "admin.crt", certificates / "admin.key")
    api = ApiClient(url, certificates / "ca.crt", admin)
    while True:
        try:
            serve_once(api, folder)
        except (OSError, ClusterError) as trouble:  # the API server is away, or about to be
            print(trouble, file=sys.stderr, flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
