"""Place of a process in a job with its own command: its rank, and the files of its pod. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disttrain_agent.environment import PodEnvironment, report_dir, termination_log
from disttrain_api.names import CONFIG_DIR, TOKEN_FILE, Env, Role
from disttrain_api.report import MAX_RANKS_PER_POD


@dataclass(frozen=True)
class Place:
    """One rank of a job with a command of its own."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank within the pod."""
    ranks_here: int
    """Ranks of the pod."""
    attempt: int
    generation: int
    """How often the ranks of the attempt have started before, in place."""
    reports: Path
    """Folder of the report files of this pod's ranks."""
    termination_log: Path | None
    """File of the pod's termination message; None where an agent writes it, which starts the ranks again in place."""
    metrics: Path | None
    """Folder of metrics.jsonl; None where the pod has none."""

    @property
    def ranks(self) -> range:
        """Global ranks of this pod."""
        first = self.rank - self.local_rank
        return range(first, first + self.ranks_here)

    def is_of_its_pod(self, environment: Mapping[str, str]) -> bool:
        """Return whether the operator finds this pod by the rank: torchrun may start other ranks than the job names, or
        number pods anew."""
        in_pod = _number(environment, Env.PET_NPROC_PER_NODE, self.ranks_here)
        first = _number(environment, Env.NODE_RANK, 0) * in_pod
        return self.ranks_here == in_pod and self.rank - self.local_rank == first

    @property
    def life(self) -> dict[str, int]:
        """How lines of metrics.jsonl name the life of the ranks, as the trainer's do."""
        return {"attempt": self.attempt} | ({"generation": self.generation} if self.generation else {})


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process; None outside a job, and in a job whose ranks the trainer's own loop reports.

    Without RANK the process is the first rank of its pod, as in a job of one rank under plain `python`.
    """
    scratch = environment.get(Env.SCRATCH)
    if not (scratch and environment.get(Env.JOB_UID)) or environment.get(Env.CONFIG):
        return None
    if environment.get(Env.ROLE, Role.WORKER) != Role.WORKER:
        return None
    ranks_here = _number(environment, Env.LOCAL_WORLD_SIZE, 1)
    first = _number(environment, Env.NODE_RANK, 0) * ranks_here
    metrics = environment.get(Env.METRICS_DIR)
    return Place(
        rank=_number(environment, Env.RANK, first),
        local_rank=_number(environment, Env.LOCAL_RANK, 0),
        ranks_here=max(1, min(ranks_here, MAX_RANKS_PER_POD)),
        attempt=_number(environment, Env.ATTEMPT, 1),
        generation=_number(environment, Env.GENERATION, 0),
        reports=report_dir(Path(scratch)),
        termination_log=None if Env.GENERATION in environment else termination_log(environment),
        metrics=Path(metrics) if metrics else None,
    )


def pod_of(place: Place, variables: Mapping[str, str]) -> PodEnvironment:
    """Return what an agent must know of the pod of this place to answer for its ranks."""
    return PodEnvironment(
        node_rank=0,
        ranks_here=place.ranks_here,
        # Not MASTER_ADDR, which torchrun sets for its ranks: `--standalone` is no matter of the network.
        master_address=variables.get(Env.PET_MASTER_ADDR, ""),
        config=None,
        scratch=place.reports.parent,
        grace_seconds=0,
        variables=variables,
        job_uid=variables.get(Env.JOB_UID, ""),
        attempt=place.attempt,
        agent_port=_number(variables, Env.AGENT_PORT, 0) or None,
        token_file=Path(variables.get(Env.TOKEN) or f"{CONFIG_DIR}/{TOKEN_FILE}"),
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default
