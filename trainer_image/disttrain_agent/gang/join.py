"""The part of a pod's agent in its gang."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.announce import announce
from disttrain_agent.gang.follow import FollowingAgent
from disttrain_agent.gang.lead import LeadingAgent
from disttrain_agent.gang.leader import Leader, Left
from disttrain_agent.gang.master_ports import free_ports
from disttrain_agent.gang.messages import Message, PodFailure
from disttrain_agent.life import Timing
from disttrain_agent.listen import open_port
from disttrain_agent.restart import Kept
from disttrain_api.report import RestartsInPlace


class Gang(Protocol):
    """All pods of the job, as the supervisor of one pod's ranks sees them."""

    @property
    def generation(self) -> int:
        """How often the ranks have started before. It grows when they are to start again."""

    @property
    def master_port(self) -> int | None:
        """The port on which the ranks of this generation meet; None: that of their pods."""

    @property
    def master_address(self) -> str | None:
        """The address of rank 0's pod for the ranks of this generation; None: that of their pods."""

    @property
    def must_stop(self) -> bool:
        """Whether the ranks of this generation are to end, since one of any pod has failed."""

    @property
    def kill(self) -> Message | None:
        """The order to kill a rank of this generation, or all, since the gang hangs; None: there is none."""

    @property
    def left(self) -> Left | None:
        """Why no rank starts again; None: they may."""

    @property
    def due(self) -> float | None:
        """When to call `tick`, as the event loop's time; None: not before something happens."""

    @property
    def restarts(self) -> RestartsInPlace | None:
        """What worker 0's agent reports of restarts."""

    @property
    def awaited(self) -> frozenset[int]:
        """Workers that all ranks wait for, as far as this pod knows: their pods are lost."""

    def hear_leader(self, address: str, replacement: int) -> bool:
        """Somebody says where worker 0's pod is, and which replacement; return whether that is one to look for."""

    def tick(self) -> None: ...
    def failed(self, ago: float) -> None: ...
    def ended(self, failure: PodFailure, ago: float) -> None: ...
    def hangs(self, generation: int, rank: int | None, kept: Kept) -> bool | str: ...
    def depart(self, why: str) -> None: ...
    def leave(self, why: str) -> None: ...
    def close(self) -> None: ...


def join_gang(
    pod: PodEnvironment, timing: Timing, changed: Callable[[], None], log: Callable[[str], None],
    heard: str | None = None,
) -> Gang | None:  # fmt: skip
    """Return the gang of a pod; None where its ranks do not start again. heard: where worker 0's pod is; None: its
    name had an address first."""
    if pod.restarts_in_place is None:
        return None
    leader = Leader(
        pod.workers, pod.restarts_in_place, timing.collect, timing.gang, timing.replacement, pod.ranks_here,
        pod.replacement, asyncio.get_running_loop().time(),
    )  # fmt: skip
    # Ranks of the trainer prove each other their generation; others know each other by their port alone.
    ports = free_ports() if pod.config is None else None
    if pod.workers == 1:
        return LeadingAgent(leader, changed, log, master_ports=ports)
    key, port = pod.gang_key, pod.gang_port
    if key is None or port is None:
        log("no restart in place: the pod has no token of its job, or no port for its gang")
        return None
    if not pod.is_master:
        host = pod.master_address.strip("[]")
        return FollowingAgent(
            changed,
            log,
            key,
            pod.node_rank,
            pod.workers,
            host,
            port,
            pod.replacement,
            timing.replacement,
            timing.unmoved,
            heard,
        )
    try:
        listener = open_port(port, loopback=pod.on_loopback)
    except (OSError, OverflowError) as error:
        log(f"no restart in place: cannot listen on port {port}: {error}")
        return None
    says = partial(announce, pod) if pod.replacement else None
    return LeadingAgent(leader, changed, log, key, pod.workers, listener, master_ports=ports, announce=says)
