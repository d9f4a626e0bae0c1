"""`spec.runPolicy.schedulingPolicy`: the scheduler of a gang, and the placement of its ranks."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel

Name = Annotated[str, Field(min_length=1, max_length=253)]


class GangScheduler(StrEnum):
    """Who sees to it that a gang is placed as a whole or not at all."""

    NONE = "None"
    GATE = "Gate"
    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"


class Topology(ApiModel):
    """Pods whose ranks share a tensor, context or pipeline group are placed together: exactly one of `required` and
    `preferred`. If no such group is larger than a pod, the whole job is one group; else servers belong to none."""

    required: Name | None = None
    """Key of a node label, for example topology.kubernetes.io/zone. A group never spans two of its values."""
    preferred: Name | None = None
    """Key of a node label. A group spans two of its values only if there is no other room."""


class SchedulingPolicy(ApiModel):
    """How the pods of a gang are placed."""

    gang_scheduler: GangScheduler = GangScheduler.NONE
    """None leaves each pod to the cluster's scheduler. Gate holds all pods until the gang fits; the operator must serve
    all namespaces, with its gate on. Kueue, Volcano and Coscheduling (scheduler-plugins) must be installed."""
    queue_name: Name | None = None
    """Queue of Kueue (a LocalQueue; it needs one) or of Volcano."""
    priority_class_name: Name | None = None
    """PriorityClass of all pods."""
    topology: Topology | None = None
    """Which ranks are placed together. Absent: any node."""
    timeout_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Gate: how long an attempt waits for room before the job fails; `startingDeadlineSeconds` begins after that.
    Absent: no limit. Coscheduling: its scheduleTimeoutSeconds."""
