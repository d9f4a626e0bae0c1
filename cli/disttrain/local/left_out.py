"""Parts of a job that have no counterpart on this machine, in words. Pure.

Fields are named unless the tables below say why not, so that one that is new in Kubernetes is named, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from disttrain.local.alone import alone
from disttrain_api.bounds import listed
from disttrain_api.names import CONTAINER
from disttrain_operator.decide.observed import Job

Pod = Mapping[str, Any]

_SOURCES = {"secretRef": "Secret", "configMapRef": "ConfigMap"}
# Done here, too; said in other words; what a process of this machine has in any case; and what is about an image.
_OF_A_CONTAINER = (
    *("name", "command", "args", "workingDir", "env", "ports", "imagePullPolicy"),
    *("image", "envFrom", "volumeMounts", "volumeDevices"),
)
_OF_A_POD = (
    *("restartPolicy", "terminationGracePeriodSeconds", "containers", "initContainers", "volumes"),
    *("hostNetwork", "hostPID", "hostIPC", "hostUsers", "imagePullSecrets"),
)


def left_out(job: Job) -> str:
    """Return what a run of the job on this machine ignores, '' if nothing."""
    found = list(alone(job)[1])
    fields: list[str] = []
    for role in (job.spec.workers, job.spec.parameter_servers) if job.spec is not None else ():
        pod: Pod = {} if role is None else role.pod_template.get("spec") or {}
        trainer = _trainer(pod)
        found += _in_words(pod, trainer)
        fields += (name for name, value in trainer.items() if value and name not in _OF_A_CONTAINER)
        fields += (name for name, value in pod.items() if value and name not in _OF_A_POD)
    found += [", ".join(dict.fromkeys(fields))] if fields else []
    return listed(list(dict.fromkeys(found)))


def _trainer(pod: Pod) -> Pod:
    return next((container for container in pod.get("containers") or [] if container["name"] == CONTAINER), {})


def _in_words(pod: Pod, trainer: Pod) -> Iterator[str]:
    if trainer.get("image"):
        yield f"image {trainer['image']} (programs and packages are those of this machine)"
    for container in pod.get("initContainers") or []:
        yield f"init container {container['name']}"
    for container in pod.get("containers") or []:
        if container is not trainer:
            yield f"container {container['name']}"
    yield from _variables(trainer)
    for mount in trainer.get("volumeMounts") or []:
        yield f"volume {mount['name']} at {mount['mountPath']}"
    for device in trainer.get("volumeDevices") or []:
        yield f"volume {device['name']} at {device['devicePath']}"


def _variables(trainer: Pod) -> Iterator[str]:
    for source in trainer.get("envFrom") or []:
        for kind in source.keys() & _SOURCES:
            prefix = f", which begin with {source['prefix']}" if source.get("prefix") else ""
            yield f"the variables of {_SOURCES[kind]} {source[kind].get('name')}{prefix} (set them in your shell)"
    references = [entry["name"] for entry in trainer.get("env") or [] if "valueFrom" in entry]
    if references:
        yield f"the values of {', '.join(references)} (set them in your shell)"
