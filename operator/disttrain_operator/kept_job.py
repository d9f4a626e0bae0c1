"""Cache entry of a job: its names, a few values for quick checks, and spec and status as bytes.

Lists of lists take forty times as much memory as their JSON, and a suspended job needs none of them. So a job is kept
as JSON, compressed where it is long, and becomes objects when it is looked at. If a spec is beyond the bounds of a
manifest, only the reasons for its refusal are kept: nothing else of it is ever needed again.

Only the metadata that is read is kept: anybody may give a job a megabyte of labels, owners or finalizers. A job
with more than `MAX_KEPT` left is not kept at all.
"""

import zlib
from typing import Any

import orjson

from disttrain_api.moved import carried_over
from disttrain_api.names import API_VERSION, CHECKPOINT_REQUEST
from disttrain_api.queue_label import queue_label
from disttrain_api.size import size_problems
from disttrain_operator.decide.observed import Job, job_facts
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.sizes import TooMuch, parsed_size, size_of

MAX_KEPT = 2**20
"""Bytes of one job. Its manifest may have as many as text, of which mostly a tenth is left."""
WHAT_TO_DO = "Apply it again with a shorter `spec`: data that is compressed or random belongs into a volume or an image"

_NAMES = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_MAX_WORD = 64
_LONG = 16 * 1024
# Shorter ones exceed no bound but that of depth.
_MEASURED = 64 * 1024
# JSON never begins with it, and what zlib writes always does.
_COMPRESSED = b"x"


def keep(raw: Raw) -> Raw:
    """Return what is kept of a raw job. What this function has returned before is returned as it is.

    Raises TypeError where it cannot be written as JSON again, TooMuch where more would be kept than may be.
    """
    if isinstance(raw.get("spec"), bytes):
        return raw
    kept = _kept(raw)
    size = size_of(kept)
    if size > MAX_KEPT:
        why = f"{size:,} bytes would be left of it, compressed, and the operator keeps {MAX_KEPT:,} of a job at most"
        raise TooMuch(why, WHAT_TO_DO)
    return kept


def _kept(raw: Raw) -> Raw:
    metadata, spec, status = raw["metadata"], raw.get("spec"), raw.get("status")
    data, refused = _spec_text(spec)
    read_as, _ = carried_over(spec)
    text = _json(status)
    return {
        "apiVersion": API_VERSION,
        "metadata": {
            **{key: metadata[key] for key in _NAMES if key in metadata},
            "labels": queue_label(metadata.get("labels")),
        },
        "spec": _compressed(data),
        "refused": refused,
        "status": _compressed(text),
        "parsed": parsed_size(data) + parsed_size(text),
        "phase": _word(_at(status, "phase")),
        "state": _word(_at(status, "goodput", "state")),
        "gang": _word(_at(read_as, "runPolicy", "schedulingPolicy", "gangScheduler")),
        "begun": _begun(status),
        "ran": isinstance(_at(_last_attempt(status), "runningTime"), str),
        "replaced": bool(_at(_last_attempt(status), "replacements")),
        "checkpoint_request": _word(_at(metadata, "annotations", CHECKPOINT_REQUEST)),
        "hangs": _holds(status, "HangSuspected"),
        "rests": any(_holds(status, type_) for type_ in ("Finished", "Suspended")),
    }


def read(kept: Raw, *, former: Job | None = None) -> Job:
    """Return the facts of a job that is kept. former: those of a version with the same spec."""
    raw = {"metadata": kept["metadata"], "spec": _unpack(kept["spec"]), "status": _unpack(kept["status"])}
    return job_facts(raw, former=former, refused=kept["refused"])


def read_status(kept: Raw) -> Any:
    """Return the status of a job that is kept, as it was read."""
    return _unpack(kept["status"])


def is_long(kept: Raw) -> bool:
    """Return whether the spec of a job that is kept takes long to read: a megabyte takes about 0.2 s."""
    return bool(kept["spec"][:1] == _COMPRESSED)


def same_spec(one: Raw, other: Raw) -> bool:
    """Return whether two versions of a job have the same spec; the label that names a queue is a part of it."""
    queues = [queue_label(version["metadata"].get("labels")) for version in (one, other)]
    return bool(one["spec"] == other["spec"] and one["refused"] == other["refused"] and queues[0] == queues[1])


def _spec_text(spec: Any) -> tuple[bytes, tuple[str, ...]]:
    try:
        data = _json(spec)
        refused = _size_problems(spec) if len(data) > _MEASURED else ()
    except TypeError:
        # It nests more than 250 levels deep, which exceeds the bound of a manifest.
        data, refused = b"", _size_problems(spec)
    if refused:
        manager = _at(carried_over(spec)[0], "managedBy")
        data = _json({"managedBy": manager} if isinstance(manager, str) else {})
    return data, refused


def _size_problems(spec: Any) -> tuple[str, ...]:
    return tuple(map(str, size_problems({"spec": spec})))


def _json(value: Any) -> bytes:
    """Return JSON in memory of its own size: what orjson returns holds 4 KiB and more, however short it is."""
    return bytes(memoryview(orjson.dumps(value)))


def _compressed(data: bytes) -> bytes:
    return zlib.compress(data, 1) if len(data) > _LONG else data


def _unpack(data: bytes) -> Any:
    return orjson.loads(zlib.decompress(data) if data[:1] == _COMPRESSED else data)


def _word(value: Any) -> str | None:
    """A word for quick looks. The whole value stands in the spec or the status."""
    return value[:_MAX_WORD] if isinstance(value, str) else None


def _begun(status: Any) -> bool:
    """Whether an attempt has begun and not ended."""
    last = _last_attempt(status)
    return last is not None and not _at(last, "endTime")


def _last_attempt(status: Any) -> Any:
    attempts = _at(status, "attempts")
    return attempts[-1] if isinstance(attempts, list) and attempts else None


def _holds(status: Any, type_: str) -> bool:
    conditions = _at(status, "conditions")
    entries = conditions if isinstance(conditions, list) else []
    return any(_at(entry, "type") == type_ and _at(entry, "status") == "True" for entry in entries)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
