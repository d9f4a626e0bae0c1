"""Place of a process in a job with its own command: its rank, and the files of its pod. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disttrain_agent.environment import report_dir, termination_log
from disttrain_api.names import Env, Role


@dataclass(frozen=True)
class Place:
    """One rank of a job with a command of its own."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank within the pod."""
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
    first = _number(environment, Env.NODE_RANK, 0) * _number(environment, Env.LOCAL_WORLD_SIZE, 1)
    metrics = environment.get(Env.METRICS_DIR)
    return Place(
        rank=_number(environment, Env.RANK, first),
        local_rank=_number(environment, Env.LOCAL_RANK, 0),
        attempt=_number(environment, Env.ATTEMPT, 1),
        generation=_number(environment, Env.GENERATION, 0),
        reports=report_dir(Path(scratch)),
        termination_log=None if Env.GENERATION in environment else termination_log(environment),
        metrics=Path(metrics) if metrics else None,
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default
