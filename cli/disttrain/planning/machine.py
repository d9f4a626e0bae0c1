"""What the ranks of a job run on, from the options of `disttrain plan` and from measurements."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disttrain.errors import USAGE, CommandError
from disttrain.planning.accelerators import ACCELERATORS, USUAL_EFFICIENCY, Accelerator
from disttrain.planning.cost import Link, Machine, rounds
from disttrain.planning.trainer import matmul_flops
from disttrain_api.collectives import Operation, bus_factor
from disttrain_api.compute import Precision
from disttrain_api.spec import JobSpec
from disttrain_operator.gate.quantities import amount
from disttrain_trainer.checks.collectives.results import Row, from_json

USUAL_LATENCY = 20e-6
"""Seconds of a message between two hosts, where only a bandwidth is given."""
_FORMATS = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}


@dataclass(frozen=True)
class Given:
    """Options that describe the machine."""

    gpu_memory: str | None = None
    accelerator: str | None = None
    flops: str | None = None
    bandwidth: str | None = None
    pod_bandwidth: str | None = None
    latency: float | None = None
    """Microseconds."""
    collectives: str | None = None

    @property
    def knows_network(self) -> bool:
        """Whether the time of messages can be estimated."""
        return self.bandwidth is not None or self.collectives is not None

    def asks_for_time(self, spec: JobSpec) -> bool:
        """Whether an option was given that only the time of a step needs."""
        return self.knows_network or self.flops is not None or (self.accelerator is not None and not _sends(spec))

    @property
    def device_bytes(self) -> int | None:
        """Return the memory of a device; None where it is not given. Raises CommandError."""
        if self.gpu_memory is not None:
            return quantity("--gpu-memory", self.gpu_memory, "80Gi")
        return None if self.accelerator is None else _accelerator(self.accelerator).memory


def machine_of(given: Given, spec: JobSpec) -> Machine:
    """Return what the job's ranks run on. Raises CommandError where an option is wrong or one is missing."""
    if _sends(spec) and not given.knows_network:
        raise CommandError(
            "the time of a step needs what the network does: give --bandwidth 12.5G (bytes per second of a rank), or"
            " --collectives FILE with the output of disttrain collectives --json",
            USAGE,
        )
    # Quick ones first: what is wrong is said before anything is measured.
    link, links = _link(given), {} if given.collectives is None else _measured(Path(given.collectives))
    if links and link is None:
        link = links.get(Operation.ALL_REDUCE) or next(iter(links.values()))
    pod = None
    if given.pod_bandwidth is not None:
        pod = Link(quantity("--pod-bandwidth", given.pod_bandwidth, "400G"), _latency(given))
    on_gpus = given.accelerator is not None or bool(spec.workers.gpus_per_pod)
    return Machine(_flops(given, spec), link, links, pod, overlaps=on_gpus)


def links_of(rows: Sequence[Row]) -> dict[Operation, Link]:
    """Return the link of each operation that was measured in two sizes or more.

    A call takes rounds x latency + bytes on the wire / bandwidth: through the smallest and the largest size.
    """
    links = {}
    for operation in dict.fromkeys(row.operation for row in rows):
        own = sorted((row for row in rows if row.operation is operation), key=lambda row: (row.bytes, row.ranks))
        least, most = own[0], own[-1]
        ranks = len(most.ranks)
        wire = [bus_factor(operation, len(row.ranks)) * row.bytes for row in (least, most)]
        if wire[1] <= wire[0] or most.seconds <= least.seconds:
            continue
        bandwidth = (wire[1] - wire[0]) / (most.seconds - least.seconds)
        latency = max(least.seconds - wire[0] / bandwidth, 0.0) / rounds(operation, ranks)
        links[operation] = Link(bandwidth, latency)
    return links


def quantity(option: str, text: str, such_as: str) -> int:
    """Return the number that a quantity means. Raises CommandError."""
    try:
        size = amount("memory", text)
    except ValueError as error:
        raise CommandError(f"{option}: found '{text}', expected a quantity such as {such_as}", USAGE) from error
    if size <= 0:
        raise CommandError(f"{option}: found '{text}', expected more than 0, such as {such_as}", USAGE)
    return size


def _sends(spec: JobSpec) -> bool:
    return spec.world_size > 1 or spec.parameter_servers is not None


def _flops(given: Given, spec: JobSpec) -> float:
    precision = spec.training.precision if spec.training is not None else Precision.FP32
    if given.flops is not None:
        return quantity("--flops", given.flops, "400T")
    if given.accelerator is not None:
        return USUAL_EFFICIENCY * _accelerator(given.accelerator).flops(precision)
    if spec.workers.gpus_per_pod:
        raise CommandError(
            "the time of a step needs what a GPU does: give --accelerator H100, or --flops 400T (FLOP/s that it"
            " reaches)",
            USAGE,
        )
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or max(1, len(os.sched_getaffinity(0)) // spec.world_size)
    return matmul_flops(_FORMATS.get(precision, "float32"), threads)


def _accelerator(name: str) -> Accelerator:
    found = {known.lower(): one for known, one in ACCELERATORS.items()}.get(name.lower())
    if found is None:
        raise CommandError(f"--accelerator: found '{name}', expected one of {', '.join(ACCELERATORS)}", USAGE)
    return found


def _latency(given: Given) -> float:
    if given.latency is None:
        return USUAL_LATENCY
    if given.latency < 0:
        raise CommandError(f"--latency: found {given.latency:g}, expected microseconds, 0 or more", USAGE)
    return given.latency / 1e6


def _link(given: Given) -> Link | None:
    if given.bandwidth is None:
        return None
    return Link(quantity("--bandwidth", given.bandwidth, "12.5G"), _latency(given))


def _measured(path: Path) -> dict[Operation, Link]:
    try:
        links = links_of(from_json(path.read_text()))
    except OSError as error:
        raise CommandError(f"--collectives: {path} cannot be read: {error.strerror}", USAGE) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--collectives: {path} is not the output of disttrain collectives --json", USAGE) from error
    if not links:
        raise CommandError(
            f"--collectives: {path} has no operation in two sizes of which the larger one takes longer: measure with"
            " --sizes 1Ki,16Mi",
            USAGE,
        )
    return links
