"""Minimum requirements of a job, and whether this machine meets them. Pure: numbers in, sentences out."""

from dataclasses import dataclass

from disttrain_api.memory import builtin_size, in_words, least_memory
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.spec import JobSpec

_MIB = 2**20
_RANKS_PER_CORE = 16
"""With more, all of them mostly wait for a core."""
_FREE_SHARE = 0.9
"""Part of the free memory that a job may take without a question: it needs more than what is counted here."""
_OWN_FILES = 64


@dataclass(frozen=True)
class Costs:
    """Least memory, in bytes, and processes and threads of bare pods; measured (tests/local/test_limits.py)."""

    once: int
    pod: int
    rank: int
    pod_tasks: int
    rank_tasks: int


FORKED = Costs(once=200 * _MIB, pod=5 * _MIB, rank=28 * _MIB, pod_tasks=2, rank_tasks=8)
"""Ranks of the trainer that share what they have imported."""
EXECUTED = Costs(once=0, pod=20 * _MIB, rank=150 * _MIB, pod_tasks=2, rank_tasks=8)
"""Ranks of the trainer that each import it."""
COMMAND = Costs(once=0, pod=3 * _MIB, rank=_MIB, pod_tasks=1, rank_tasks=1)
"""Programs of the user, of which nothing is known."""


@dataclass(frozen=True)
class Machine:
    """Resources of the machine. None: not known, or unlimited."""

    cores: int
    memory: int | None
    """Bytes, with swap."""
    free_memory: int | None
    tasks: int | None
    """Processes and threads that may still be started."""
    files: int | None
    """Files that a process may have open."""


@dataclass(frozen=True)
class Demand:
    """Minimum requirements of a job."""

    pods: int
    ranks: int
    parameters: int | None
    """Bytes of a built-in model that needs more memory than all else."""
    memory: int
    peak_memory: int
    """While all ranks build their models at the same time."""
    tasks: int

    @property
    def runner_files(self) -> int:
        """Files that the runner has open."""
        return 2 * self.pods + _OWN_FILES

    @property
    def files(self) -> int:
        """Files that the runner, or a rank that talks to all others, has open."""
        return max(self.runner_files, 4 * self.ranks + _OWN_FILES)


@dataclass(frozen=True)
class Misfit:
    """Why a job is not started without a word."""

    sentence: str
    certain: bool
    """Whether it cannot work; else it may."""


def demand_of(spec: JobSpec, costs: Costs) -> Demand:
    """Return what the job needs at least."""
    servers = spec.pods - spec.workers.replicas
    ranks = spec.world_size + servers
    bare = costs.once + spec.pods * costs.pod + ranks * costs.rank
    tasks = spec.pods * costs.pod_tasks + ranks * costs.rank_tasks
    parameters, memory, peak = _model(spec)
    large = parameters if peak > bare else None
    return Demand(spec.pods, spec.world_size, large, bare + memory, bare + peak, tasks)


def find_misfit(demand: Demand, machine: Machine) -> Misfit | None:
    """Return why the machine is too small for the job, or may be; None where the numbers fit."""
    for certain, found in ((True, _impossible(demand, machine)), (False, _doubtful(demand, machine))):
        if found:
            verb = "does not fit" if certain else "may not fit"
            return Misfit(f"the job {verb} this machine: {_what(demand)} need {', and '.join(found)}", certain)
    return None


def _model(spec: JobSpec) -> tuple[int | None, int, int]:
    """Parameters of the model, and bytes that all pods need for it: in any case, and if all build it at once."""
    size = builtin_size(spec.training) if spec.training is not None else None
    if size is None or spec.training is None:
        return None, 0, 0
    mode = spec.parallelism.data_parallel.mode
    by_servers = mode is DataParallelMode.PARAMETER_SERVER
    ranks, each = spec.world_size, spec.workers.ranks_per_pod
    mesh = Mesh.of_group(spec.parallelism, each) if by_servers else Mesh.of(spec.parallelism, ranks)
    least = least_memory(size, spec.training, mesh, mode)
    if spec.workers.gpus_per_pod and not spec.training.offload.parameters:
        return size.parameters, least.whole, ranks * least.whole
    return size.parameters, least.of_ranks(ranks) + least.servers, ranks * least.peak + least.servers


def _impossible(demand: Demand, machine: Machine) -> list[str]:
    found = []
    if machine.memory is not None and demand.memory > machine.memory:
        found.append(f"at least {in_words(demand.memory)} of memory (there are {in_words(machine.memory)})")
    if machine.tasks is not None and demand.tasks > machine.tasks:
        found.append(f"at least {demand.tasks:,} processes and threads (its limits leave {machine.tasks:,})")
    if machine.files is not None and demand.runner_files > machine.files:
        found.append(f"{demand.runner_files:,} open files (`ulimit -Hn` is {machine.files:,})")
    return found


def _doubtful(demand: Demand, machine: Machine) -> list[str]:
    found = []
    if machine.free_memory is not None and demand.peak_memory > _FREE_SHARE * machine.free_memory:
        found.append(f"{in_words(demand.peak_memory)} of memory or more ({in_words(machine.free_memory)} are free)")
    if demand.ranks > _RANKS_PER_CORE * machine.cores:
        found.append(f"{demand.ranks:,} cores to run side by side (there are {machine.cores})")
    if machine.files is not None and demand.files > machine.files:
        found.append(f"{demand.files:,} open files (`ulimit -Hn` is {machine.files:,})")
    return found


def _what(demand: Demand) -> str:
    ranks = f"{_count(demand.ranks, 'rank')} in {_count(demand.pods, 'pod')}"
    return ranks if demand.parameters is None else f"{ranks}, with {demand.parameters:,} parameters,"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
