"""The time of a step: what a rank computes and sends, put into the usual cost models. Pure.

A message takes `latency` of a link, and its bytes go one after the other at the link's `bandwidth` (Hockney 1994). The
collectives are rings, as those of NCCL and gloo are for large messages (Patarasuk and Yuan 2009).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from disttrain_api.collectives import Operation, bus_factor

BACKWARD_PART = 2 / 3
"""The backward pass's part of the time of both passes."""
_OF_REPLICAS = ("replicate", "shard")
"""Axes along which gradients are summed and parameters gathered, while layers are computed."""


@dataclass(frozen=True)
class Message:
    """All calls of one operation in groups along one axis of the mesh, in a step; as the trainer counts them."""

    operation: Operation
    axis: str
    ranks: int
    within_pod: bool
    calls: float
    bytes: float
    every: int = 1

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends in a step, on average over the steps."""
        return bus_factor(self.operation, self.ranks) * self.bytes / self.every

    @property
    def rounds(self) -> float:
        """Messages that wait for each other in a step, on average over the steps."""
        return rounds(self.operation, self.ranks) * self.calls / self.every


@dataclass(frozen=True)
class Bubble:
    """The idle part of a pipeline, 0 to 1."""

    ranks: int
    microbatches: int
    schedule: str
    idle: float


@dataclass(frozen=True)
class ServerTraffic:
    """Bytes between a worker and all parameter servers in a step."""

    workers: int
    servers: int
    pushed: float
    pulled: float

    @property
    def crowd(self) -> float:
        """Return how many workers' bytes the busier end of the connections carries, a worker's or a server's."""
        return max(self.workers / self.servers, 1)

    def seconds(self, link: "Link") -> float:
        """Return what a push and a pull take, if each worker's bytes lie evenly on the servers."""
        return sum(link.seconds(size * self.crowd, self.crowd) for size in (self.pushed, self.pulled))


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step."""

    flops: float
    messages: Sequence[Message] = ()
    bubble: Bubble | None = None
    servers: ServerTraffic | None = None


@dataclass(frozen=True)
class Link:
    """How fast a rank sends."""

    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds of a message without content."""

    def seconds(self, wire_bytes: float, messages: float) -> float:
        """Return what so many messages take, one after the other."""
        return messages * self.latency + wire_bytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """What the ranks of a job run on."""

    flops: float
    """FLOP/s that a rank reaches."""
    link: Link | None = None
    """None: ranks send nothing."""
    links: Mapping[Operation, Link] = field(default_factory=dict)
    """Links of the operations that were measured by themselves."""
    pod_link: Link | None = None
    """Between ranks of one pod; None: as between pods."""
    overlaps: bool = False
    """Whether layers are computed while others send; not where one processor does both."""

    def link_of(self, message: Message) -> Link:
        """Return the link that a message takes. Raises ValueError where none is known."""
        own = self.pod_link if message.within_pod and self.pod_link is not None else None
        found = own or self.links.get(message.operation) or self.link
        if found is None:
            raise ValueError(f"the bandwidth of {message.operation} is not known")
        return found


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of a rank, by part."""

    compute: float
    bubble: float
    messages: Sequence[tuple[Message, float]]
    hidden: float
    """What of the messages is sent while layers are computed."""
    servers: float = 0.0
    """The time that pushes to parameter servers and pulls take."""

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return self.compute + self.bubble + self.sending - self.hidden

    @property
    def sending(self) -> float:
        """Return the seconds of all that is sent."""
        return sum(seconds for _, seconds in self.messages) + self.servers


def step_time(work: StepWork, machine: Machine) -> StepTime:
    """Return the time of a step. Raises ValueError where a link is not known."""
    compute = work.flops / machine.flops
    sent = [(one, machine.link_of(one).seconds(one.wire_bytes, one.rounds)) for one in work.messages]
    of_replicas = sum(seconds for one, seconds in sent if one.axis in _OF_REPLICAS and one.every == 1)
    hidden = min(of_replicas, BACKWARD_PART * compute) if machine.overlaps else 0.0
    served = 0.0
    if work.servers is not None:
        if machine.link is None:
            raise ValueError("the bandwidth between workers and servers is not known")
        served = work.servers.seconds(machine.link)
    return StepTime(compute, bubble_seconds(compute, work.bubble), sent, hidden, served)


def rounds(operation: Operation, ranks: int) -> int:
    """Messages that wait for each other in one call."""
    match operation:
        case Operation.ALL_REDUCE:
            return 2 * (ranks - 1)
        case Operation.BROADCAST | Operation.REDUCE:
            return ceil(log2(ranks))
        case Operation.SEND_RECV:
            return 1
        case _:
            return ranks - 1


def bubble_seconds(compute: float, bubble: Bubble | None) -> float:
    """Return the time in which a rank that computes for so long has nothing to do."""
    return 0.0 if bubble is None else compute * bubble.idle / (1 - bubble.idle)


def bubble_of_equal_stages(ranks: int, microbatches: int) -> float:
    """Return the idle part of GPipe and 1F1B (Narayanan et al. 2021): (p - 1) / (m + p - 1)."""
    return (ranks - 1) / (microbatches + ranks - 1)


def ring_all_reduce(ranks: int, size: float, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2(n - 1) messages of size / n."""
    return link.seconds(bus_factor(Operation.ALL_REDUCE, ranks) * size, rounds(Operation.ALL_REDUCE, ranks))


def central_servers(workers: int, servers: int, size: float, link: Link) -> float:
    """Return the seconds in which each worker pushes and pulls so many bytes, spread evenly over the servers."""
    return ServerTraffic(workers, servers, size, size).seconds(link)


def variance_of_mean(workers: int) -> float:
    """Return the variance of the mean of independent updates, relative to that of one."""
    return 1 / workers
