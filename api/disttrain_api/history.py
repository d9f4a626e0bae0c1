"""History of finished jobs: what is kept of a job when its pods, and then the job itself, are gone.

One ConfigMap per namespace, `disttrain-history`, with an entry for each job. The key of an entry begins with the time
at which the job finished, so that keys in their order are jobs in theirs. Whoever may change ConfigMaps of the
namespace may put anything there: what cannot be read is passed over.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from disttrain_api.bounds import cut
from disttrain_api.status import CheckpointStatus, Goodput, JobStatus, Phase, Progress, StatusModel, Time, Verdict
from disttrain_api.times import parse_time

HISTORY_NAME = "disttrain-history"
FINISHED_PHASES = frozenset((Phase.SUCCEEDED.value, Phase.FAILED.value))
MAX_ENTRY_BYTES = 4096
"""The most that one entry takes as JSON."""
MAX_HISTORY_BYTES = 512 * 1024
"""The most that all entries of a namespace take. An API server stores 1 MiB of a ConfigMap."""
_MAX_TEXT = 300
_MAX_METRICS = 8
_KEY = re.compile(r"\d{8}T\d{6}Z\.[A-Za-z0-9-]{1,64}")


class HistoryEntry(StatusModel):
    """What is kept of a finished job."""

    name: str
    """Name of the job."""
    namespace: str
    """Its namespace."""
    uid: str
    """Its uid."""
    phase: str
    """Succeeded or Failed."""
    reason: str | None = None
    """Reason of the condition Complete or Failed."""
    message: str | None = None
    """Its sentence."""
    creation_time: Time | None = None
    """When the job was created."""
    completion_time: Time
    """When it finished."""
    attempts: int = 0
    """Number of its last attempt."""
    restarts: int = 0
    """Restarts of the gang or of single pods."""
    mesh: str | None = None
    """Degrees of the mesh, for example "pp2 x dp8"."""
    world_size: int | None = None
    """Number of ranks."""
    verdict: Verdict | None = None
    """Why its last attempt ended, without lines of its log."""
    progress: Progress | None = None
    """The last progress that the ranks reported, with figures of the last evaluation."""
    checkpoint: CheckpointStatus | None = None
    """The last complete checkpoint."""
    goodput: Goodput | None = None
    """Where its time went."""


def entry_of(metadata: Mapping[str, Any], status: Any) -> tuple[str, str] | None:
    """Return key and text of a finished job's entry; None where the status says of no end that can be read.

    metadata: name, namespace, uid and creationTimestamp of the job.
    """
    try:
        read = JobStatus.model_validate(status)
        entry = _entry(metadata, read)
    except ValueError:
        return None
    ended = parse_time(entry.completion_time)
    if ended is None or entry.phase not in FINISHED_PHASES:
        return None
    text = _text(entry)
    if len(text.encode()) > MAX_ENTRY_BYTES:
        text = _text(entry.model_copy(update=dict.fromkeys(("verdict", "progress", "checkpoint", "goodput"))))
    key = f"{ended:%Y%m%dT%H%M%SZ}.{entry.uid}"
    return (key, text) if _KEY.fullmatch(key) and len(text.encode()) <= MAX_ENTRY_BYTES else None


def changes(present: Any, new: Mapping[str, str], most: int) -> dict[str, str | None]:
    """Return the merge patch of the ConfigMap's `data` after which it holds the newest entries.

    They are `most` at most, and of MAX_HISTORY_BYTES together. Keys that are no entry's are left alone.
    """
    old = {key: str(text) for key, text in (present or {}).items() if _KEY.fullmatch(key)}
    kept, size = set[str](), 0
    for key in sorted({**new, **old}, reverse=True)[:most]:
        size += len(key) + len((old.get(key) or new.get(key) or "").encode())
        if size > MAX_HISTORY_BYTES:
            break
        kept.add(key)
    added: dict[str, str | None] = {key: text for key, text in new.items() if key in kept and key not in old}
    return added | dict.fromkeys(old.keys() - kept)


def read_entries(config_maps: Iterable[Mapping[str, Any]]) -> list[HistoryEntry]:
    """Return the entries of ConfigMaps of this name, the last finished first."""
    found = list[tuple[str, HistoryEntry]]()
    for config_map in config_maps:
        data, namespace = config_map.get("data"), config_map["metadata"]["namespace"]
        for key, text in (data if isinstance(data, dict) else {}).items():
            if not (_KEY.fullmatch(key) and isinstance(text, str) and len(text) <= MAX_ENTRY_BYTES):
                continue
            try:
                entry = HistoryEntry.model_validate_json(text, extra="ignore")
            except ValueError:
                continue
            if parse_time(entry.completion_time) is None:
                continue
            found.append((key, entry.model_copy(update={"namespace": namespace})))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _entry(metadata: Mapping[str, Any], status: JobStatus) -> HistoryEntry:
    last = status.attempts[-1] if status.attempts else None
    end = next((one for one in status.conditions if one.type in ("Complete", "Failed") and one.status == "True"), None)
    verdict = None if last is None else last.verdict
    if verdict is not None:
        verdict = verdict.model_copy(update={"log": None, "message": cut(verdict.message, _MAX_TEXT)})
    progress = status.progress
    if progress is not None:
        progress = progress.model_copy(update={"metrics": progress.metrics[:_MAX_METRICS]})
    return HistoryEntry(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        phase=status.phase or "",
        reason=None if end is None else cut(end.reason, _MAX_TEXT),
        message=None if end is None else cut(end.message, _MAX_TEXT),
        creation_time=metadata.get("creationTimestamp"),
        completion_time=status.completion_time or "",
        attempts=status.attempt,
        restarts=status.restarts,
        mesh=status.mesh,
        world_size=status.world_size,
        verdict=verdict,
        progress=progress,
        checkpoint=status.checkpoint,
        goodput=status.goodput,
    )


def _text(entry: HistoryEntry) -> str:
    return entry.model_dump_json(by_alias=True, exclude_none=True)
