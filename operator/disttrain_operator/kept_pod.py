"""Cache entries of pods and Services: what decisions read, in bounded length.

Ten thousand pods with their full templates would be hundreds of megabytes; and lists and texts in a pod, or in its
status, may have any length. So what is kept is chosen field by field, and of these all that is long is kept as JSON,
compressed where that is worth it: parsed, a megabyte of node affinity takes fourteen. `read_pod` makes objects of it.
A pod of which more than `MAX_KEPT` would be left is not kept at all.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from disttrain_api.names import (
    API_VERSION,
    CONTAINER,
    GANG_GATE,
    KIND,
    QUEUE_NAME_LABEL,
    Annotation,
    Env,
    Label,
    Reason,
)
from disttrain_api.ownership import controlling_job
from disttrain_operator.decide.addresses import awaits_address
from disttrain_operator.decide.init_containers import (
    failed_entry,
    has_run,
    is_sidecar,
    memory_limit,
    name_of,
    relevant_init_container,
)
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.sizes import TooMuch, size_of
from disttrain_operator.plan.kueue import MANAGED_LABEL, TERMINATION_TARGET
from disttrain_operator.plan.ranks_probe import PROBE_MARK

MAX_KEPT = 64 * 1024
"""Bytes of one pod or Service."""
MAX_HELD = 256 * 1024
"""Bytes of JSON of what the release of a pod repeats. The gate reads 500 lines of node affinity, which are less."""
FACTS_BYTES = 1024
"""What is read from a pod takes these, and what its status says, in words of its own."""
WHAT_TO_DO = "Make its node affinity and its scheduling gates shorter"

# What is kept of every pod: its group is found by it, and the agents and the gate read it.
_NAMES = ("name", "namespace", "uid", "resourceVersion")
_TIMES = ("deletionTimestamp", "deletionGracePeriodSeconds", "creationTimestamp")
_OWN_LABELS = (Label.ROLE, Label.INDEX, Label.ATTEMPT)
_LABELS = (*_OWN_LABELS, QUEUE_NAME_LABEL, MANAGED_LABEL)
_CONDITION = ("type", "status", "reason", "lastTransitionTime")
_DISRUPTIONS = ("DisruptionTarget", TERMINATION_TARGET)
_WITH_MESSAGE = (*_DISRUPTIONS, "PodScheduled")
"""Conditions whose message is read."""
_WAITING = ("reason", "message")
_TERMINATED = ("exitCode", "signal", "reason", "finishedAt")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_MAX_CONDITIONS = 100
_MAX_TERMINATION_MESSAGE = 4096
# One more than is read, which shows that there is more.
_MAX_TEXT = 1024 + 1
_MAX_NAME = 256
_MAX_TIME = 64
_LONG = 4096
# JSON never begins with it, and what zlib writes always does.
_COMPRESSED = b"x"


def keep_pod(raw: Raw) -> Raw:
    """Return what decisions read of a pod, and what its release has to repeat. What is kept already stays as it is.

    Raises TooMuch where more would be kept than may be.
    """
    if isinstance(raw.get("packed"), bytes):
        return raw
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    labels = metadata.get("labels") or {}
    seen = _status(raw)
    kept = {
        "metadata": _metadata(metadata) | {"labels": _words(labels, _OWN_LABELS)},
        "spec": agent_in(spec, status),
        "status": _words(status, ("phase", "podIP")),
        "packed": _pack(
            {
                "metadata": _times(metadata) | {"labels": _words(labels, _LABELS)},
                "spec": _words(spec, ("nodeName",)) | _held(spec) | _containers_of_spec(raw),
                "status": seen,
            }
        ),
        "reserved": FACTS_BYTES + 2 * len(orjson.dumps(seen)),
    }
    return _bounded(kept | ({"ends": True} if _ends(metadata, status, seen) else {}))


def read_pod(kept: Raw) -> Raw:
    """Return a kept pod as the API server would write it, as far as it is kept."""
    rest = _unpack(kept["packed"])
    return {
        "metadata": {**kept["metadata"], **rest["metadata"]},
        "spec": {**kept["spec"], **rest["spec"]},
        "status": {**kept["status"], **rest["status"]},
    }


def keep_service(raw: Raw) -> Raw:
    """Return the names of a Service: that it exists is all that is asked of it."""
    return _bounded({"metadata": _metadata(raw["metadata"])})


def _ends(metadata: Raw, status: Raw, kept: Raw) -> bool:
    """Whether the pod, or a container of it, has ended or is about to: its job cannot wait. `kept`: of the status."""
    if metadata.get("deletionTimestamp") or status.get("phase") in ("Failed", "Succeeded"):
        return True
    if any("terminated" in entry["state"] for entry in kept.get("containerStatuses", ())):
        return True
    conditions = kept.get("conditions", ())
    return any(entry.get("type") in _DISRUPTIONS and entry.get("status") == "True" for entry in conditions)


def _bounded(kept: Raw) -> Raw:
    size = size_of(kept)
    if size > MAX_KEPT:
        raise TooMuch(f"{size:,} bytes would be left of it, and the operator keeps {MAX_KEPT:,} at most", WHAT_TO_DO)
    return kept


def _metadata(metadata: Raw) -> Raw:
    kept = {key: metadata[key] for key in _NAMES if key in metadata}
    job = controlling_job(metadata)
    if not isinstance(job, str) or len(job) > _MAX_NAME:
        return kept
    # Which version of the API the owner says is all the same.
    return kept | {"ownerReferences": [{"apiVersion": API_VERSION, "kind": KIND, "uid": job, "controller": True}]}


def _times(metadata: Raw) -> Raw:
    kept = _words(metadata, _TIMES, _MAX_TIME)
    own = _words(metadata.get("annotations") or {}, (Annotation.RELEASED_AT, Annotation.NOT_ON), _MAX_TIME)
    return kept | {"annotations": own} if own else kept


def agent_in(spec: Raw, status: Raw) -> dict[str, int]:
    """Return the port on which the pod's agent answers, and which replacement of a lost pod this is, if any; nothing
    where its container has ended."""
    trainer: Raw = next(_trainers(spec.get("containers")), {})
    state = next(_trainers(status.get("containerStatuses")), {}).get("state") or {}
    if state.get("terminated") is not None:
        return {}
    numbers = {"agentPort": _number_of(trainer, Env.AGENT_PORT), "replacement": _number_of(trainer, Env.REPLACEMENT)}
    return {name: number for name, number in numbers.items() if number is not None}


def _number_of(container: Raw, variable: str) -> int | None:
    texts = [entry.get("value") for entry in container.get("env") or [] if entry.get("name") == variable]
    text = texts[0] if texts else None
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 9 else None


def _held(spec: Raw) -> Raw:
    """Return what the release of a gated pod must repeat."""
    gates = spec.get("schedulingGates") or []
    if not any(gate.get("name") == GANG_GATE for gate in gates):
        return {}
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED)
    held: Raw = {"schedulingGates": [{"name": gate.get("name")} for gate in gates]}
    if required:
        held["affinity"] = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": required.get("nodeSelectorTerms")}}}
    size = len(orjson.dumps(held))
    if size > MAX_HELD:
        found = f"its scheduling gates and its required node affinity have {size:,} bytes"
        raise TooMuch(f"{found}; the operator keeps {MAX_HELD:,} at most", WHAT_TO_DO)
    return held


def _containers_of_spec(raw: Raw) -> Raw:
    """Return what the spec says of the containers in the status."""
    own, init_container, kept = (
        next(_trainers((raw.get("status") or {}).get("containerStatuses")), {}),
        relevant_init_container(raw),
        Raw(),
    )
    if own_fields := _limit(own, memory_limit(raw, None)) | _probe(raw):
        kept["containers"] = [{"name": CONTAINER, **own_fields}]
    if init_container is not None:
        sidecar = {"restartPolicy": "Always"} if is_sidecar(raw, init_container) else {}
        limit = _limit(init_container, memory_limit(raw, name_of(init_container)))
        kept["initContainers"] = [{**_words(init_container, ("name",)), **sidecar, **limit}]
    return kept


def _probe(raw: Raw) -> Raw:
    """Our startup probe, while its pod waits for the address of worker 0."""
    own = next(_trainers((raw.get("status") or {}).get("containerStatuses")), {})
    return {} if awaits_address(raw, own) is None else {"startupProbe": {"exec": {"command": [PROBE_MARK]}}}


def _limit(status: Mapping[str, Any], memory: str) -> Raw:
    """Return the memory limit, if the container of this status exceeded it."""
    ended = (status.get("state") or {}).get("terminated") or {}
    return {"resources": {"limits": {"memory": memory}}} if memory and ended.get("reason") == Reason.OOM_KILLED else {}


def _status(raw: Raw) -> Raw:
    status: Raw = raw.get("status") or {}
    kept = _words(status, ("reason",)) | _termination_message(status)
    if status.get("conditions"):
        kept["conditions"] = [_condition(entry) for entry in status["conditions"][:_MAX_CONDITIONS]]
    statuses = _containers(status)
    if statuses:
        kept["containerStatuses"] = statuses
    init_container = relevant_init_container(raw)
    if init_container is not None:
        kept["initContainerStatuses"] = [_init_container(init_container)]
    return kept


def _containers(status: Raw) -> list[Raw]:
    """Return the status of the trainer's container, and of another one that has failed beside it.

    If the pod has failed, they also tell whether another container has run.
    """
    entries: list[Raw] = status.get("containerStatuses") or []
    own = next(_trainers(entries), None)
    kept = [] if own is None else [_container_since(own) | _probed(own)]
    beside = failed_entry(status)
    if beside is not None and own is not None and (own.get("state") or {}).get("running") is not None:
        kept.append(_container(beside))
    if status.get("phase") == "Failed" and (own is None or not has_run(own)) and any(map(has_run, entries)):
        kept.append({"state": {"terminated": {}}})
    return kept


def _trainers(entries: list[Raw] | None) -> Iterator[Raw]:
    return (entry for entry in entries or [] if entry.get("name") == CONTAINER)


def _condition(entry: Raw) -> Raw:
    return _words(entry, _CONDITION) | (_words(entry, ("message",)) if entry.get("type") in _WITH_MESSAGE else {})


def _container(entry: Mapping[str, Any]) -> Raw:
    return _words(entry, ("name", "image")) | {"state": _state(entry.get("state") or {})}


def _container_since(entry: Mapping[str, Any]) -> Raw:
    """The same with since when it runs, and how it ended before."""
    kept = _container(entry)
    if kept["state"].get("running") is not None:
        kept["state"]["running"] = _words(entry["state"]["running"], ("startedAt",), _MAX_TIME)
    last = (entry.get("lastState") or {}).get("terminated")
    return kept | ({} if last is None else {"lastState": _state({"terminated": last})})


def _probed(entry: Mapping[str, Any]) -> Raw:
    """That it runs and its startup probe has not succeeded yet."""
    runs = (entry.get("state") or {}).get("running") is not None
    return {"started": False} if runs and entry.get("started") is False else {}


def _init_container(entry: Mapping[str, Any]) -> Raw:
    return _container_since(entry) | _words(entry, ("restartCount", "started"))


def _state(state: Raw) -> Raw:
    kept = Raw()
    if state.get("waiting") is not None:
        kept["waiting"] = _words(state["waiting"], _WAITING)
    if state.get("running") is not None:
        kept["running"] = {}
    if state.get("terminated") is not None:
        kept["terminated"] = _words(state["terminated"], _TERMINATED) | _termination_message(state["terminated"])
    return kept


def _words(entry: Mapping[str, Any], keys: Iterable[str], most: int = _MAX_TEXT) -> Raw:
    """These texts, or their begin, and these numbers."""
    found = ((key, entry.get(key)) for key in keys)
    return {key: value[:most] if isinstance(value, str) else value for key, value in found if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int)


def _termination_message(entry: Raw) -> Raw:
    """The end of the message: a program's last words hold the cause."""
    message = entry.get("message")
    return {"message": message[-_MAX_TERMINATION_MESSAGE:]} if isinstance(message, str) else {}


def _pack(value: Raw) -> bytes:
    # What orjson returns holds 4 KiB and more, however short it is.
    data = bytes(memoryview(orjson.dumps(value)))
    return zlib.compress(data, 1) if len(data) > _LONG else data


def _unpack(data: bytes) -> Any:
    return orjson.loads(zlib.decompress(data) if data[:1] == _COMPRESSED else data)
