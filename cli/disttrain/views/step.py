"""Output of `disttrain plan`: what a rank computes and sends in a step, and how long that takes. Pure."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from disttrain.planning.cost import (
    BACKWARD_PART,
    Link,
    Machine,
    Message,
    ServerTraffic,
    StepTime,
    StepWork,
    bubble_of_equal_stages,
    central_servers,
    ring_all_reduce,
    variance_of_mean,
)
from disttrain_api.collectives import Operation
from disttrain_api.memory import in_words
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode, PipelineSchedule, Synchronization
from disttrain_api.spec import JobSpec

SENT_HEADINGS = ("SENT IN A STEP", "AXIS", "RANKS", "CALLS", "BYTES", "ON THE WIRE")
TIME_HEADINGS = ("TIME OF A STEP", "SECONDS", "")
_FACTORS = {
    Operation.ALL_REDUCE: "2(n-1)/n",
    Operation.BROADCAST: "1",
    Operation.REDUCE: "1",
    Operation.SEND_RECV: "1",
}
_EQUAL_STAGES = (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)


def sent_rows(work: StepWork) -> list[list[str]]:
    """Return a row for each operation and axis."""
    rows = [
        [
            one.operation + (f", every {one.every} steps" if one.every > 1 else ""),
            one.axis,
            str(one.ranks),
            f"{one.calls:g}",
            in_words(round(one.bytes)),
            in_words(round(one.wire_bytes)),
        ]
        for one in work.messages
    ]
    if (traffic := work.servers) is not None:
        for name, size in (("push", traffic.pushed), ("pull", traffic.pulled)):
            rows.append([name, "servers", str(traffic.servers), "1", *[in_words(round(size))] * 2])
    return rows


def time_rows(work: StepWork, time: StepTime, machine: Machine) -> list[list[str]]:
    """Return a row for each part, with the numbers put in."""
    rows = [["compute", _seconds(time.compute), f"{work.flops:.4g} FLOP / {machine.flops:.4g} FLOP/s"]]
    if work.bubble is not None:
        idle = work.bubble.idle
        rows.append(["bubble", _seconds(time.bubble), f"{work.bubble.schedule}: {100 * idle:.1f} % of a rank's time"])
    rows += [[f"{one.operation}, {one.axis}", _seconds(took), _sum(one, machine)] for one, took in time.messages]
    if work.servers is not None and machine.link is not None:
        rows.append(["push and pull", _seconds(time.servers), _served(work.servers, machine.link)])
    if time.hidden:
        rows.append(["hidden", f"-{_seconds(time.hidden)}", "sent while layers are computed"])
    return [*rows, ["step", _seconds(time.total), ""]]


def formulas(spec: JobSpec, work: StepWork | None, machine: Machine | None, trained_bytes: int | None) -> Iterator[str]:
    """Yield the cost models that the job's strategy uses, with its numbers.

    trained_bytes: of the whole model, where the manifest says them.
    """
    mode = spec.parallelism.data_parallel.mode
    if work is not None and work.bubble is not None and work.bubble.schedule in _EQUAL_STAGES:
        ranks, count = work.bubble.ranks, work.bubble.microbatches
        share = 100 * bubble_of_equal_stages(ranks, count)
        yield f"Bubble: (p-1)/(m+p-1) = ({ranks}-1)/({count}+{ranks}-1) = {share:.1f} %."
    yield from _mean(spec)
    if work is not None and machine is not None:
        yield from _ring_or_central(work, machine)
    if mode is DataParallelMode.PARAMETER_SERVER and spec.parameter_servers is not None:
        traffic = work.servers if work is not None else None
        if traffic is None and trained_bytes is not None:
            workers = _workers(spec)
            traffic = ServerTraffic(workers, spec.parameter_servers.replicas, trained_bytes, trained_bytes)
        if traffic is not None:
            yield from _busier_end(traffic, machine)


def _mean(spec: JobSpec) -> Iterator[str]:
    """What the mean of all replicas is worth."""
    data_parallel, replicas = spec.parallelism.data_parallel, _replicas(spec)
    settings = data_parallel.parameter_server
    alone = settings is not None and settings.synchronization is not Synchronization.SYNC
    if replicas > 1 and not (data_parallel.mode is DataParallelMode.PARAMETER_SERVER and alone):
        what = "gradients" if data_parallel.relaxed is None else "updates"
        yield (
            f"Mean: 1/M x the sum of M = {replicas} replicas' {what}. Its variance is 1/M ="
            f" {variance_of_mean(replicas):.3g} of that of one."
        )


def _ring_or_central(work: StepWork, machine: Machine) -> Iterator[str]:
    """What the sum of gradients takes in a ring, and through one server."""
    for one in work.messages:
        if (one.operation, one.axis, one.every) != (Operation.ALL_REDUCE, "replicate", 1):
            continue
        link, size, n = machine.link_of(one), one.bytes / one.calls, one.ranks
        ring, central = (one.calls * took(n, size, link) for took in (ring_all_reduce, _central))
        yield (
            f"Gradients in a ring: 2(n-1) x (size/n / bandwidth + latency) = {_seconds(ring)} s, n = {n}, size ="
            f" {in_words(round(size))}, {one.calls:g} calls. Through one central server: 2n x (size / bandwidth +"
            f" latency) = {_seconds(central)} s."
        )


def _central(ranks: int, size: float, link: Link) -> float:
    return central_servers(ranks, 1, size, link)


def _busier_end(traffic: ServerTraffic, machine: Machine | None) -> Iterator[str]:
    pushed, pulled = (in_words(round(size)) for size in (traffic.pushed, traffic.pulled))
    most = in_words(round(traffic.crowd * max(traffic.pushed, traffic.pulled)))
    yield (
        f"Each of {traffic.workers} workers pushes {pushed} and pulls {pulled} in a step. The busier end, of a worker"
        f" or of one of {traffic.servers} servers, carries up to {most} each way."
    )
    if machine is not None and machine.link is not None:
        took = traffic.seconds(machine.link)
        yield f"That takes {_seconds(took)} s: max(workers/servers, 1) x (size / bandwidth + latency) for each."


def remarks(machine: Machine) -> Iterator[str]:
    """Yield what the time assumes."""
    if machine.overlaps:
        yield (
            "What goes along replicate and shard axes is assumed to be sent while layers are computed, for up to"
            f" {100 * BACKWARD_PART:.0f} % of the time of computing; the rest is waited for."
        )
    else:
        yield "Nothing is assumed to be sent while layers are computed: the processor does both."


def as_data(work: StepWork | None, time: StepTime | None, machine: Machine | None) -> dict[str, Any] | None:
    """Return the step as plain data, for JSON."""
    if work is None:
        return None
    sent = [asdict(one) | {"wire_bytes": one.wire_bytes} for one in work.messages]
    found: dict[str, Any] = {"flops": work.flops, "sent": sent, "seconds": None}
    found["bubble"] = None if work.bubble is None else asdict(work.bubble)
    found["servers"] = None if work.servers is None else asdict(work.servers)
    if time is not None and machine is not None:
        found["seconds"] = {
            "compute": time.compute,
            "bubble": time.bubble,
            "sending": [took for _, took in time.messages],
            "hidden": time.hidden,
            "servers": time.servers,
            "step": time.total,
        }
        found["machine"] = {"flops": machine.flops, "overlaps": machine.overlaps}
    return found


def _replicas(spec: JobSpec) -> int:
    if spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER:
        return _workers(spec) * Mesh.of_group(spec.parallelism, spec.workers.ranks_per_pod).data_parallel
    return Mesh.of(spec.parallelism, spec.world_size).data_parallel


def _served(traffic: ServerTraffic, link: Link) -> str:
    sizes = " + ".join(in_words(round(size)) for size in (traffic.pushed, traffic.pulled))
    latency = f" + 2 x {1e6 * link.latency:.3g} us" if link.latency else ""
    return f"{traffic.crowd:g} x (({sizes}) / {link.bandwidth / 1e9:.3g} GB/s{latency})"


def _workers(spec: JobSpec) -> int:
    return spec.world_size // Mesh.of_group(spec.parallelism, spec.workers.ranks_per_pod).world_size


def _sum(one: Message, machine: Machine) -> str:
    link = machine.link_of(one)
    factor = _FACTORS.get(one.operation, "(n-1)/n")
    size = in_words(round(one.bytes / one.every))
    messages = f"{one.rounds:g} x {1e6 * link.latency:.3g} us" if link.latency else ""
    bandwidth = f"{factor} x {size} / {link.bandwidth / 1e9:.3g} GB/s, n = {one.ranks}"
    return " + ".join(part for part in (bandwidth, messages) if part)


def _seconds(value: float) -> str:
    return f"{value:.3g}"
