"""Raw pods of the API server -> facts. A pod and its status may hold any text and any time."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from disttrain_api.bounds import MAX_REASON_LENGTH, cut
from disttrain_api.names import CONTAINER, GANG_GATE, QUEUE_NAME_LABEL, Annotation, Label, Reason, Role
from disttrain_api.report import decode_pod_report
from disttrain_api.times import EARLIEST, LATEST, parse_time
from disttrain_operator.decide.addresses import awaits_address
from disttrain_operator.decide.init_containers import (
    MAX_TERMINATION_MESSAGE,
    failed,
    failed_beside,
    is_sidecar,
    memory_limit,
    name_of,
    nothing_has_run,
    relevant_init_container,
    waiting_of,
    why_waiting,
)
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import (
    Admission,
    CreateProblem,
    Deletion,
    Exit,
    Observed,
    PodCondition,
    PodEvent,
    PodFacts,
    Waiting,
)
from disttrain_operator.plan.kueue import MANAGED_LABEL, TERMINATION_TARGET

Raw = Mapping[str, Any]

_MAX_MESSAGE = 1024
_MAX_CONDITIONS = 100
_NO_LOG = "Error on reading termination message from logs"
_MAX_GRACE_SECONDS = 10**9
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


def pod_facts(raw: Raw, *, gone: bool = False) -> PodFacts | None:
    """Return the facts of a raw pod, or None if its labels are not those of a job's pod."""
    metadata = raw["metadata"]
    labels = metadata.get("labels") or {}
    try:
        role, index, attempt = Role(labels[Label.ROLE]), _number(labels[Label.INDEX]), _number(labels[Label.ATTEMPT])
    except (KeyError, ValueError):
        return None
    status: Raw = raw.get("status") or {}
    container = _trainer_status(status)
    init_container = relevant_init_container(raw)
    exit_ = _exit(raw, container, init_container)
    running = (container.get("state") or {}).get("running")
    runs = running is not None
    deletion = _deletion(metadata)
    disruption, disruption_message, disrupted_at = _disruption(status, ended=exit_ is not None)
    if exit_ is not None and exit_.reason == _EVICTED and disruption is None:
        # A pod that is evicted for its node's sake has a condition that says so.
        exit_ = replace(exit_, reason=Reason.STORAGE_LIMIT_EXCEEDED)
    gated = any(gate.get("name") == GANG_GATE for gate in (raw.get("spec") or {}).get("schedulingGates") or [])
    annotations = metadata.get("annotations") or {}
    released_at = parse_time(annotations.get(Annotation.RELEASED_AT))
    return PodFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        index=index,
        attempt=attempt,
        node=(raw.get("spec") or {}).get("nodeName"),
        scheduled_at=_since(status, "PodScheduled"),
        program_started=exit_ is not None or runs,
        runs_since=parse_time(running.get("startedAt")) if running is not None else None,
        awaits_address=awaits_address(raw, container) if exit_ is None else None,
        pod_ended=status.get("phase") in ("Succeeded", "Failed"),
        failed_beside=failed_beside(status) if exit_ is None and runs else "",
        cut_off=exit_ is None and runs and is_unready(status),
        ready_since=_since(status, "Ready"),
        deletion=deletion,
        gone=gone,
        waiting=None if exit_ or gated else _waiting(raw, container, init_container, released=released_at is not None),
        exit=exit_,
        report=decode_pod_report(exit_.message) if exit_ and exit_.message and not exit_.init_container else None,
        disruption=disruption,
        disruption_message=disruption_message,
        disrupted_at=disrupted_at,
        gated=gated,
        released_at=released_at,
        excludes_nodes=Annotation.NOT_ON in annotations,
        conditions=_conditions(status) if exit_ or deletion or gone else (),
    )


def observe(
    pods: Iterable[Raw],
    gone_pods: Iterable[Raw] = (),
    problems: Iterable[CreateProblem] = (),
    services: Iterable[str] = (),
    admission: Admission | None = None,
    live: Live | None = None,
    pod_event: PodEvent | None = None,
) -> Observed:
    """Everything that a decision may know, from raw objects."""
    facts = [pod_facts(raw) for raw in pods] + [pod_facts(raw, gone=True) for raw in gone_pods]
    known = sorted(
        (pod for pod in facts if pod is not None), key=lambda pod: (pod.attempt, pod.role, pod.index, pod.uid)
    )
    return Observed(tuple(known), tuple(problems), frozenset(services), admission, live, pod_event)


def _number(label: str) -> int:
    if not _NUMBER.fullmatch(label):
        raise ValueError("no number that the operator writes")
    return int(label)


def _text(raw: Raw, key: str, most: int, default: str = "") -> str:
    """A text that anybody may have written, of any length."""
    return cut(raw.get(key) or default, most)


def _deletion(metadata: Raw) -> Deletion | None:
    if not metadata.get("deletionTimestamp"):
        return None
    # A grace of centuries, which anybody may ask for, ends beyond all times that are reckoned with.
    deadline = parse_time(metadata["deletionTimestamp"]) or LATEST
    grace = timedelta(seconds=min(max(metadata.get("deletionGracePeriodSeconds") or 0, 0), _MAX_GRACE_SECONDS))
    return Deletion(asked=max(deadline - grace, EARLIEST), deadline=deadline)


# Reasons of the condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": Reason.PREEMPTED,
    "EvictionByEvictionAPI": Reason.DRAINED,
    "DeletionByTaintManager": Reason.DRAINED,
    "TerminationByKubelet": Reason.EVICTED,
    "DeletionByPodGC": Reason.NODE_LOST,
}
# Reasons of a failed pod's status.
_POD_REASONS = {"NodeShutdown": Reason.DRAINED, "NodeLost": Reason.NODE_LOST}
_EVICTED = "Evicted"
# Why a kubelet does not take a pod: what its node has, is or does then. What any node would refuse is not among them.
_REJECTIONS = frozenset(
    {
        *("UnexpectedAdmissionError", "TopologyAffinityError", "NodeAffinity", "NodeName", "NodePorts"),
        *("TaintToleration", "InvalidNodeInfo", "VolumeAttachmentLimitExceeded", "NodeShutdown", _EVICTED),
    }
)
_NO_ROOM = "OutOf"
_REJECTED = "Pod was rejected: "


def _disruption(status: Raw, *, ended: bool) -> tuple[str | None, str, datetime | None]:
    conditions = {entry.get("type"): entry for entry in status.get("conditions") or []}
    evicted = conditions.get(TERMINATION_TARGET)
    if evicted is not None and evicted.get("status") == "True":
        return Reason.PREEMPTED, _text(evicted, "message", _MAX_MESSAGE), parse_time(evicted.get("lastTransitionTime"))
    target = conditions.get("DisruptionTarget")
    if target is not None and target.get("status") == "True":
        reason: str = _DISRUPTIONS.get(target.get("reason", ""), Reason.EVICTED)
        ready = conditions.get("Ready", {}).get("status")
        # A node that is alive lets a pod that it must give up end well; on a dead one it only ceases to be ready.
        if target.get("reason") == "DeletionByTaintManager" and ready == "False" and not ended:
            reason = Reason.NODE_LOST
        return reason, _text(target, "message", _MAX_MESSAGE), parse_time(target.get("lastTransitionTime"))
    if status.get("phase") != "Failed":
        return None, "", None
    word, message = status.get("reason") or "", _text(status, "message", _MAX_MESSAGE).removeprefix(_REJECTED).strip()
    if (word in _REJECTIONS or word.startswith(_NO_ROOM)) and nothing_has_run(status):
        return Reason.REJECTED, message, None
    return _POD_REASONS.get(word), message, None


def _since(status: Raw, type_: str) -> datetime | None:
    """Since when the condition of this type holds; None: it does not, or nobody says."""
    conditions = (entry for entry in status.get("conditions") or [] if entry.get("type") == type_)
    holds: Raw = next((entry for entry in conditions if entry.get("status") == "True"), {})
    return parse_time(holds.get("lastTransitionTime"))


def is_unready(status: Raw) -> bool:
    """Return whether a pod with this raw status is not ready since its node has not reported for a while."""
    conditions: list[Raw] = status.get("conditions") or []
    ready: Raw = next((entry for entry in conditions if entry.get("type") == "Ready"), {})
    # With a reason the kubelet says so itself, of a probe that fails or a container that starts.
    return ready.get("status") == "False" and not ready.get("reason")


def _conditions(status: Raw) -> tuple[PodCondition, ...]:
    # As long as those that a rule of the failure policy can name.
    return tuple(
        PodCondition(_text(entry, "type", 316), _text(entry, "status", 16), _text(entry, "reason", 1024))
        for entry in (status.get("conditions") or [])[:_MAX_CONDITIONS]
    )


def _trainer_status(status: Raw) -> Raw:
    containers = status.get("containerStatuses") or []
    return next((container for container in containers if container.get("name") == CONTAINER), {})


def _exit(raw: Raw, container: Raw, init_container: Raw | None) -> Exit | None:
    status: Raw = raw.get("status") or {}
    terminated = (container.get("state") or {}).get("terminated")
    # A pod that the kubelet or the node controller ended (eviction, lost node) may say nothing of its container.
    pod_reason = status.get("reason") if status.get("phase") == "Failed" else None
    name = None
    if status.get("phase") == "Failed" and init_container is not None and failed(raw, init_container):
        terminated, name = init_container["state"]["terminated"], name_of(init_container)
    if terminated:
        code = terminated.get("exitCode", 0)
        signal = terminated.get("signal") or (code - 128 if 128 < code < 160 else None)
        return Exit(
            code=code if code or status.get("phase") != "Failed" or not pod_reason else None,
            signal=signal,
            reason=cut(pod_reason or terminated.get("reason") or "", MAX_REASON_LENGTH),
            message=(_last_words(terminated) or status.get("message") or "")[-MAX_TERMINATION_MESSAGE:],
            finished_at=parse_time(terminated.get("finishedAt")),
            init_container=name,
            memory_limit=memory_limit(raw, name) if terminated.get("reason") == Reason.OOM_KILLED else "",
        )
    if status.get("phase") == "Failed":
        reason = _text(status, "reason", MAX_REASON_LENGTH, "PodFailed")
        return Exit(None, None, reason, _text(status, "message", _MAX_MESSAGE), None)
    if status.get("phase") == "Succeeded":
        return Exit(0, None, "Completed", "", None)
    return None


def _last_words(terminated: Raw) -> str:
    """Return what the container left; nothing where the kubelet says that it found no log of it."""
    message = str(terminated.get("message") or "")
    return "" if message.startswith(_NO_LOG) else message


# Volcano's words for members of a gang that, as a whole, has no room.
_NOT_PLACED = {"Schedulable": Reason.UNSCHEDULABLE, "Undetermined": Reason.UNSCHEDULABLE}


def _waiting(raw: Raw, container: Raw, init_container: Raw | None, *, released: bool) -> Waiting | None:
    status: Raw = raw.get("status") or {}
    labels: Raw = raw["metadata"].get("labels") or {}
    if init_container is not None:
        return why_waiting(init_container, sidecar=is_sidecar(raw, init_container))
    if (waiting := waiting_of(container)) is not None:
        return waiting
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            found = _text(condition, "reason", MAX_REASON_LENGTH, Reason.UNSCHEDULABLE)
            reason = _NOT_PLACED.get(found, found)
            if reason == "SchedulingGated" and released:
                return None  # the scheduler has not seen its release yet
            if reason == "SchedulingGated" and QUEUE_NAME_LABEL in labels:
                reason = Reason.QUEUED if MANAGED_LABEL in labels else Reason.QUEUE_NOT_SERVED
            return Waiting(reason, _text(condition, "message", _MAX_MESSAGE))
    return None
