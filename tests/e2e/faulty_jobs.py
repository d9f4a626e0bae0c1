"""Jobs that have a fault, in parts: what they are made of."""

from typing import Any

from tests.builders import merge
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.manifests import ONE_THREAD, job, program

SHARED = "shared"
"""A claim of which several jobs make use."""


def sleeps(name: str, pod: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A program of one pod that would sleep. pod: laid over the pod's spec."""
    made = program(name, "sleep 3600", TRAINER_IMAGE, replicas=1, **spec)
    template = made["spec"]["workers"]["template"]
    made["spec"]["workers"]["template"] = merge(template, {"spec": pod or {}})
    return made


def runs(name: str, script: str, **spec: Any) -> dict[str, Any]:
    """A program of one pod that is not started again."""
    return program(name, script, TRAINER_IMAGE, replicas=1, **merge({"runPolicy": {"maxRestarts": 0}}, spec))


def trains(name: str, template: dict[str, Any] = ONE_THREAD, **spec: Any) -> dict[str, Any]:
    """A training of one rank, with a few steps."""
    base = {
        "workers": {"replicas": 1, "template": template},
        "runPolicy": {"maxRestarts": 1, "restartBackoffSeconds": 1},
        "training": {
            "model": {"name": "mlp"},
            "data": {"name": "digits"},
            "optimizer": {"name": "SGD", "learningRate": 0.1},
            "steps": 5,
            "globalBatchSize": 8,
        },
    }
    return job(name, merge(base, spec))


def volume(of: dict[str, Any]) -> dict[str, Any]:
    """Spec of a pod whose program mounts a volume."""
    return {"volumes": [{"name": "more"} | of], "containers": [mounting("/more")]}


def mounting(path: str) -> dict[str, Any]:
    mounts = [{"name": "more", "mountPath": path}]
    return {"name": "trainer", "image": TRAINER_IMAGE, "command": ["sleep", "3600"], "volumeMounts": mounts}


def container(**changes: Any) -> dict[str, Any]:
    sleeping = {"name": "trainer", "image": TRAINER_IMAGE, "command": ["sleep", "3600"]}
    return {"containers": [sleeping | changes]}


def damages(folder: str, copy: str) -> dict[str, Any]:
    """Template with an init container that copies a folder of the shared claim, and spoils the checkpoints in it."""
    script = f"cp -r /all/{folder} /all/{copy} && for one in /all/{copy}/step-*/*.distcp; do echo spoilt > $one; done"
    mounts = [{"name": "disttrain-storage", "mountPath": "/all"}]
    spoil = {"name": "spoil", "image": TRAINER_IMAGE, "command": ["sh", "-c", script], "volumeMounts": mounts}
    return merge(ONE_THREAD, {"spec": {"initContainers": [spoil]}})


def small_memory(path: str) -> dict[str, Any]:
    """Spec of a pod that has 1 MiB of memory as a folder of its trainer."""
    container = ONE_THREAD["spec"]["containers"][0] | {"volumeMounts": [{"name": "more", "mountPath": path}]}
    return {
        "volumes": [{"name": "more", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
        "containers": [container],
    }


APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"disttrain.io/job-name": "too-far-apart"}},
            }
        ]
    }
}
