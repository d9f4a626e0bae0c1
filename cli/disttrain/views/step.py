"""Output of `disttrain plan`: what a rank computes and sends in a step, and how long that takes. Pure."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from disttrain.planning.cost import (
    BACKWARD_PART,
    Machine,
    Message,
    StepTime,
    StepWork,
    bubble_of_equal_stages,
    central_servers,
    variance_of_mean,
)
from disttrain_api.collectives import Operation
from disttrain_api.memory import in_words
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode, PipelineSchedule
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
    return [
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


def time_rows(work: StepWork, time: StepTime, machine: Machine) -> list[list[str]]:
    """Return a row for each part, with the numbers put in."""
    rows = [["compute", _seconds(time.compute), f"{work.flops:.4g} FLOP / {machine.flops:.4g} FLOP/s"]]
    if work.bubble is not None:
        idle = work.bubble.idle
        rows.append(["bubble", _seconds(time.bubble), f"{work.bubble.schedule}: {100 * idle:.1f} % of a rank's time"])
    rows += [[f"{one.operation}, {one.axis}", _seconds(took), _sum(one, machine)] for one, took in time.messages]
    if time.hidden:
        rows.append(["hidden", f"-{_seconds(time.hidden)}", "sent while layers are computed"])
    return [*rows, ["step", _seconds(time.total), ""]]


def formulas(spec: JobSpec, work: StepWork | None, machine: Machine | None, trained_bytes: int | None) -> Iterator[str]:
    """Yield the cost models that the job's strategy uses, with its numbers."""
    mode = spec.parallelism.data_parallel.mode
    if work is not None and work.bubble is not None and work.bubble.schedule in _EQUAL_STAGES:
        ranks, count = work.bubble.ranks, work.bubble.microbatches
        share = 100 * bubble_of_equal_stages(ranks, count)
        yield f"Bubble: (p-1)/(m+p-1) = ({ranks}-1)/({count}+{ranks}-1) = {share:.1f} %."
    if spec.parallelism.data_parallel.relaxed is not None:
        replicas = Mesh.of(spec.parallelism, spec.world_size).data_parallel
        yield (
            f"The mean of {replicas} replicas' updates has 1/M = {variance_of_mean(replicas):.3g} of the variance of"
            " one."
        )
    if mode is DataParallelMode.PARAMETER_SERVER and trained_bytes is not None and spec.parameter_servers is not None:
        workers = _workers(spec)
        servers = spec.parameter_servers.replicas
        each = trained_bytes * max(workers / servers, 1)
        yield (
            f"Each of {workers} workers pushes and pulls {in_words(trained_bytes)} in a step. The busier end, of a"
            f" worker or of one of {servers} servers, carries {in_words(round(each))} each way."
        )
        if machine is not None and machine.link is not None:
            took = central_servers(workers, servers, trained_bytes, machine.link)
            yield f"That takes {_seconds(took)} s: 2 x (max(workers/servers, 1) x (size / bandwidth + latency))."


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
    if time is not None and machine is not None:
        found["seconds"] = {
            "compute": time.compute,
            "bubble": time.bubble,
            "sending": [took for _, took in time.messages],
            "hidden": time.hidden,
            "step": time.total,
        }
        found["machine"] = {"flops": machine.flops, "overlaps": machine.overlaps}
    return found


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
