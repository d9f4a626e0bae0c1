"""What the caches keep of pods and Services: what decisions read, in bounded length.

Ten thousand pods with their full templates would be hundreds of megabytes; and lists and texts in a pod, or in its
status, may have any length.
"""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import CONTAINER, Annotation, Env
from disttrain_api.ownership import controller
from disttrain_operator.kube.cache import Raw

_NAMES = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "creationTimestamp",
)
# Those that decisions read are below these. Labels of a pod that the operator made are a dozen.
_LABELS = ("disttrain.io/", "app.kubernetes.io/", "kueue.x-k8s.io/")
_MAX_LABELS = 64
_MAX_CONDITIONS = 100
_MAX_CONTAINERS = 64
_MAX_TEXT = 4096
_MAX_TIME = 64


def keep_pod(raw: Raw) -> Raw:
    """Return what decisions read of a pod, and what its release has to repeat."""
    spec, annotations = raw.get("spec") or {}, raw["metadata"].get("annotations") or {}
    kept: Raw = {"nodeName": spec.get("nodeName")}
    if (port := _agent_port(spec)) is not None:
        kept["agentPort"] = port
    if spec.get("schedulingGates"):
        kept |= {"schedulingGates": spec["schedulingGates"], "affinity": spec.get("affinity")}
    metadata = _metadata(raw)
    if Annotation.RELEASED_AT in annotations:
        metadata["annotations"] = {Annotation.RELEASED_AT: str(annotations[Annotation.RELEASED_AT])[:_MAX_TIME]}
    return {"metadata": metadata, "spec": kept, "status": _status(raw.get("status") or {})}


def keep_service(raw: Raw) -> Raw:
    """Return the names of a Service: that it exists is all that is asked of it."""
    return {"metadata": _metadata(raw)}


def _agent_port(spec: Raw) -> int | None:
    """The port on which the pod's agent answers; None: it has none. What is kept once is kept again."""
    if "agentPort" in spec:
        kept: int = spec["agentPort"]
        return kept
    containers: list[Raw] = spec.get("containers") or []
    trainer: Raw = next((entry for entry in containers if entry.get("name") == CONTAINER), {})
    texts = [entry.get("value") for entry in trainer.get("env") or [] if entry.get("name") == Env.AGENT_PORT]
    text = texts[0] if texts else None
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 5 else None


def _metadata(raw: Raw) -> Raw:
    metadata = raw["metadata"]
    kept = {key: metadata[key] for key in _NAMES if key in metadata}
    labels = [(key, value) for key, value in (metadata.get("labels") or {}).items() if key.startswith(_LABELS)]
    kept["labels"] = dict(labels[:_MAX_LABELS])
    owner = controller(metadata)
    return kept if owner is None else kept | {"ownerReferences": [owner]}


def _status(status: Raw) -> Raw:
    kept: Raw = {key: _short(status[key]) for key in ("phase", "reason", "message", "podIP") if key in status}
    if status.get("conditions"):
        kept["conditions"] = [_flat(entry) for entry in status["conditions"][:_MAX_CONDITIONS]]
    own = [entry for entry in status.get("containerStatuses") or [] if entry.get("name") == CONTAINER]
    for key, entries in (
        ("containerStatuses", own[:1]),
        ("initContainerStatuses", (status.get("initContainerStatuses") or [])[:_MAX_CONTAINERS]),
    ):
        if entries:
            kept[key] = [_container(entry) for entry in entries]
    return kept


def _container(entry: Mapping[str, Any]) -> Raw:
    state = entry.get("state") or {}
    kept = {key: _flat(state[key]) for key in ("waiting", "running", "terminated") if state.get(key) is not None}
    return {"name": entry.get("name"), "image": _short(entry.get("image")), "state": kept}


def _flat(entry: Mapping[str, Any]) -> Raw:
    return {key: _short(value) for key, value in entry.items()}


def _short(value: Any) -> Any:
    """The end of a text: a program's last words hold the cause."""
    return value[-_MAX_TEXT:] if isinstance(value, str) else value
