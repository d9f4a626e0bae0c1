"""The containers of a raw pod, init containers above all: which says why the program does not run yet, or never will.

An init container with `restartPolicy: Always` is a sidecar: it goes on beside the program, which waits until it has
started. Where all other containers are never restarted, the kubelet reports one that keeps failing as terminated or as
running, with a count of its restarts.
"""

from collections.abc import Mapping
from typing import Any

from disttrain_api.bounds import MAX_REASON_LENGTH, cut
from disttrain_api.names import CONTAINER, Reason
from disttrain_api.times import parse_time, timestamp
from disttrain_operator.decide.observed import RUNTIME_REASONS, Waiting

Raw = Mapping[str, Any]

_MAX_CONTAINERS = 64
_MAX_MESSAGE = 1024
MAX_NAME = 64
"""Characters of a container's name that are kept. The API server allows 63."""
MAX_TERMINATION_MESSAGE = 4096
_WITH_OUTPUT = frozenset({"Unhealthy", "ProbeError", "ProbeWarning", "FailedPostStartHook", "PostStartHookError"})
"""Reasons with which a kubelet passes on the output of a probe or a hook."""
# A container has these reasons while its turn has not come, and while it is being made.
_USUAL = ("", "ContainerCreating", "PodInitializing")


def relevant_init_container(raw: Raw) -> Raw | None:
    """Return the status of the init container that says most of a pod whose program has not started; None: none does.

    In a pod that has failed that is the one that failed, else one that ran; in others the first that holds it up.
    """
    status: Raw = raw.get("status") or {}
    if any(entry.get("name") == CONTAINER and has_run(entry) for entry in status.get("containerStatuses") or []):
        return None
    entries, sidecars = (status.get("initContainerStatuses") or [])[:_MAX_CONTAINERS], _sidecars(raw)
    if status.get("phase") == "Failed":
        ended_ill = (entry for entry in entries if _exit_code(entry) and entry.get("name") not in sidecars)
        return next(ended_ill, None) or next(filter(has_run, entries), None)
    return next((entry for entry in entries if why_waiting(entry, sidecar=entry.get("name") in sidecars)), None)


def is_sidecar(raw: Raw, entry: Raw) -> bool:
    """Return whether the init container of this status runs beside the program."""
    return entry.get("name") in _sidecars(raw)


def _sidecars(raw: Raw) -> set[str | None]:
    init_containers = (raw.get("spec") or {}).get("initContainers") or []
    return {container.get("name") for container in init_containers if container.get("restartPolicy") == "Always"}


def has_run(entry: Raw) -> bool:
    """Return whether the container of this status runs or has run."""
    states = (entry.get("state") or {}, entry.get("lastState") or {})
    return any(state.get(key) is not None for state in states for key in ("running", "terminated"))


def nothing_has_run(status: Raw) -> bool:
    """Return whether no container of the pod of this status has ever run."""
    before, beside = status.get("initContainerStatuses") or [], status.get("containerStatuses") or []
    return not any(map(has_run, (*before[:_MAX_CONTAINERS], *beside)))


def failed(raw: Raw, entry: Raw) -> bool:
    """Return whether the container of this status has ended otherwise than well, and is not started again."""
    return bool(_exit_code(entry)) and not is_sidecar(raw, entry)


def _exit_code(entry: Raw) -> int:
    """With what it has ended; 0 also where it has not."""
    code: int = ((entry.get("state") or {}).get("terminated") or {}).get("exitCode") or 0
    return code


def memory_limit(raw: Raw, init_container: str | None) -> str:
    """Return the memory that this container, None for the program's, or else its whole pod, may use; "": any."""
    spec: Raw = raw.get("spec") or {}
    part, name = ("initContainers", init_container) if init_container is not None else ("containers", CONTAINER)
    own: Raw = next((entry for entry in spec.get(part) or [] if entry.get("name") == name), {})
    limits = ((entry.get("resources") or {}).get("limits") or {} for entry in (own, spec))
    return cut(next((limit for limit in (entry.get("memory") for entry in limits) if limit), ""), MAX_NAME)


def name_of(entry: Raw) -> str:
    """Return the name of the container of this status."""
    return cut(entry.get("name") or "", MAX_NAME)


def waiting_of(entry: Raw) -> Waiting | None:
    """Return why the kubelet does not start the container of this status; None where it waits for nothing."""
    waiting = (entry.get("state") or {}).get("waiting") or {}
    reason = cut(waiting.get("reason") or "", MAX_REASON_LENGTH)
    if reason in _USUAL:
        return None
    message, image = waiting.get("message") or "", cut(entry.get("image") or "", _MAX_MESSAGE)
    message = cut(without_output(reason, message), _MAX_MESSAGE)
    return Waiting(reason, message, image)


def without_output(reason: str, message: str) -> str:
    """Return what a kubelet says without what a probe or a hook has printed, which may follow the first colon."""
    return message.partition(":")[0] if reason in _WITH_OUTPUT else message


def why_waiting(entry: Raw, *, sidecar: bool) -> Waiting | None:
    """Return why this init container holds the pod up; None where it does not, or its turn has not come."""
    state, last = entry.get("state") or {}, (entry.get("lastState") or {}).get("terminated")
    running, ended, waiting = state.get("running"), state.get("terminated"), waiting_of(entry)
    image = cut(entry.get("image") or "", _MAX_MESSAGE)
    subject = f"{'sidecar' if sidecar else 'init'} container {name_of(entry)}"
    starting = running is not None and not (sidecar and entry.get("started") is True)
    if ended is not None and (sidecar or ended.get("exitCode")):
        return Waiting(Reason.CRASH_LOOP, _ended(subject, ended, entry, more=1), image)
    if last is not None and (sidecar and starting if waiting is None else waiting.reason == Reason.CRASH_LOOP):
        return Waiting(Reason.CRASH_LOOP, _ended(subject, last, entry, more=0), image)
    if running is None or not starting:
        return waiting
    since = parse_time(running.get("startedAt"))
    text = f"{subject} has run" + (f" since {timestamp(since)}" if since is not None else "")
    probed = ", and its startupProbe has not succeeded" if sidecar else ""
    return Waiting(Reason.POD_INITIALIZING, text + probed, image)


def failed_entry(status: Raw) -> Raw | None:
    """Return the status of the first further container, of those beside the program, that has failed."""
    entries: list[Raw] = (status.get("containerStatuses") or [])[:_MAX_CONTAINERS]
    return next((entry for entry in entries if entry.get("name") != CONTAINER and _exit_code(entry)), None)


def failed_beside(status: Raw) -> str:
    """Return which further container of the pod of this status has failed, and how; "" where none has."""
    entry = failed_entry(status)
    return "" if entry is None else _ended(f"container {name_of(entry)}", entry["state"]["terminated"], entry, more=1)


def _ended(subject: str, ended: Raw, entry: Raw, *, more: int) -> str:
    """How it ended last, and how often it has: `more` times than it was started again. What it printed is its log's."""
    code, times = ended.get("exitCode") or 0, max(entry.get("restartCount") or 0, 0) + more
    often = f" {times} times" if times > 1 else ""
    reason = cut(ended.get("reason") or "", MAX_REASON_LENGTH)
    how = f"exit code {code}" if reason in ("", "Error", "Completed") else f"{reason}, exit code {code}"
    text = str(ended.get("message") or "").strip() if reason in RUNTIME_REASONS else ""
    sentence = f"{subject} {'failed' if code else 'ended'}{often} ({how})"
    return cut(f"{sentence}: {text}" if text else sentence, _MAX_MESSAGE)
