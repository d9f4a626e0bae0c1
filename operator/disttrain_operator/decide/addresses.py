"""Pods whose containers run and whose ranks do not: their agents wait for the address of worker 0.

The kubelet says so of each container that has a startup probe of ours (plan/ranks_probe.py). An agent of an older image
passes that probe as well, and of programs of one's own nobody asks.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from disttrain_api.bounds import continued
from disttrain_api.names import CONTAINER, Reason, Role
from disttrain_api.times import EARLIEST, parse_time, timestamp
from disttrain_operator.decide.gang import Gang
from disttrain_operator.plan.ranks_probe import asks_for_ranks

Raw = Mapping[str, Any]

USUAL_SECONDS = 20
"""So long the address may take before it is worth a word: most clusters have it within a few."""
_NAMED = 3


def awaits_address(raw: Raw, container: Raw) -> datetime | None:
    """Since when the agent of a raw pod, with this status of its container, waits; None where it does not."""
    running = (container.get("state") or {}).get("running")
    if running is None or container.get("started") is not False:
        return None
    containers = (raw.get("spec") or {}).get("containers") or []
    own: Raw = next((entry for entry in containers if entry.get("name") == CONTAINER), {})
    return (parse_time(running.get("startedAt")) or EARLIEST) if asks_for_ranks(own) else None


def address_overdue_at(gang: Gang) -> datetime | None:
    """When a gang that waits for nothing but the address is to say so; None where it does not."""
    since = _since(gang)
    return None if since is None else since + timedelta(seconds=USUAL_SECONDS)


def why_without_address(gang: Gang) -> tuple[str, str] | None:
    """(reason, sentence) of a gang of which all containers run and not all ranks; None where it is not one."""
    since = _since(gang)
    if since is None:
        return None
    # Uids are random: in whatever order the pods go on, those that are named seldom change.
    waiting = sorted(gang.awaiting_address, key=lambda pod: pod.uid)
    named = ", ".join(sorted(pod.name for pod in waiting[:_NAMED]))
    subject = (
        f"pod {named}" if len(waiting) == 1 else f"pods {named}" + (" and others" if len(waiting) > _NAMED else "")
    )
    verb = "has" if len(waiting) == 1 else "have"
    sentence = f"{subject} {verb} waited for the address of worker 0 since {timestamp(since)}, and started no rank"
    itself = any((pod.role, pod.index) == (Role.WORKER, 0) for pod in waiting)
    advice = (
        "check the cluster's DNS, and that the job's Service has an endpoint for worker 0"
        if itself
        else "worker 0 has found it: check the cluster's DNS on the nodes of these pods"
    )
    return Reason.WAITING_FOR_ADDRESS, continued(sentence, advice)


def _since(gang: Gang) -> datetime | None:
    """Return since when the first of them waits, if every container runs; otherwise another reason is reported
    first."""
    times = [pod.awaits_address for pod in gang.awaiting_address if pod.awaits_address is not None]
    return min(times, default=None) if gang.all_started else None
