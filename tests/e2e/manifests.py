"""Jobs of the end-to-end tests."""

from pathlib import Path
from typing import Any

from disttrain_api.manifest import load
from tests.builders import a_claim_template, merge

EXAMPLES = Path(__file__).parents[2] / "examples"
STORAGE = a_claim_template(retain=False, storageClassName="disttrain-shared")


def example(name: str, **spec: Any) -> dict[str, Any]:
    """An example manifest; `spec` is laid over it."""
    manifest = load(EXAMPLES / f"{name}.yaml").model_dump(mode="json", by_alias=True, exclude_none=True)
    return merge(manifest, {"spec": spec})


# The nodes of the test cluster share one machine's cores: without this each rank would take all of them for itself.
_THREADS = {"name": "OMP_NUM_THREADS", "value": "1"}
ONE_THREAD = {"spec": {"containers": [{"name": "trainer", "env": [_THREADS]}]}}

# For slow_data.py: jobs that wait for what is done to them leave the processors to that.
USER_CODE = "user-code"
SLOW_DATA = {"entrypoint": "slow_data:images", "config": {"seconds": 0.002}}
MODEL = {"name": "mlp", "config": {"inputSize": 64, "outputSize": 10}}
WITH_SLOW_DATA = {
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "env": [_THREADS, {"name": "PYTHONPATH", "value": "/user-code"}],
                "volumeMounts": [{"name": USER_CODE, "mountPath": "/user-code"}],
            }
        ],
        "volumes": [{"name": USER_CODE, "configMap": {"name": USER_CODE}}],
    }
}

# The same, its pods on as many nodes as there are.
APART = {
    "spec": {
        **WITH_SLOW_DATA["spec"],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"disttrain.io/role": "worker"}},
                "matchLabelKeys": ["disttrain.io/job-uid", "disttrain.io/attempt"],
            }
        ],
    }
}


NO_CHECKPOINT_SOON = {"checkpoint": {"interval": 1_000_000}}
"""Changes of `training`: a checkpoint is there only where somebody has asked for it."""


def long_job(name: str, **spec: Any) -> dict[str, Any]:
    """Two workers that train until they are stopped, with a checkpoint every 20 steps on shared storage."""
    base = {
        "workers": {"replicas": 2, "template": WITH_SLOW_DATA},
        "storage": STORAGE,
        "training": {
            "model": MODEL,
            "data": SLOW_DATA,
            "optimizer": {"name": "SGD", "learningRate": 0.05},
            "steps": 1_000_000,
            "microBatchSize": 16,
            "checkpoint": {"interval": 20, "keepLatest": 2},
            "logging": {"interval": 20},
        },
    }
    return job(name, merge(base, spec))


def server_job(name: str, steps: int, **spec: Any) -> dict[str, Any]:
    """Two workers and two parameter servers, each replaced alone, with a checkpoint every 50 steps."""
    base = {
        "workers": {"replicas": 2, "template": WITH_SLOW_DATA},
        "parameterServers": {"replicas": 2, "template": WITH_SLOW_DATA},
        "storage": STORAGE,
        "parallelism": {"dataParallel": {"mode": "ParameterServer", "parameterServer": {"synchronization": "Async"}}},
        "runPolicy": {"maxRestarts": 3, "failurePolicy": {"rules": [{"name": "alone", "action": "RestartPod"}]}},
        "training": {
            "model": MODEL,
            "data": SLOW_DATA,
            "optimizer": {"name": "SGD", "learningRate": 0.05},
            "steps": steps,
            "globalBatchSize": 32,
            "checkpoint": {"interval": 50, "keepLatest": 2},
            "logging": {"interval": 100},
        },
    }
    return job(name, merge(base, spec))


def near(operator: str, node: str) -> dict[str, Any]:
    """A template of pods that go to the node (In), or to another one (NotIn), where they can."""
    wanted = {"key": "kubernetes.io/hostname", "operator": operator, "values": [node]}
    term = {"weight": 100, "preference": {"matchExpressions": [wanted]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"spec": {**WITH_SLOW_DATA["spec"], "affinity": affinity}}


def program(name: str, script: str, image: str, *, replicas: int = 2, **spec: Any) -> dict[str, Any]:
    """A job whose pods run a script of their own under /bin/sh."""
    container = {"name": "trainer", "image": image, "command": ["/bin/sh", "-c", script]}
    base = {"workers": {"replicas": replicas, "template": {"spec": {"containers": [container]}}}}
    return job(name, merge(base, spec))


def job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": {"name": name}, "spec": spec}
