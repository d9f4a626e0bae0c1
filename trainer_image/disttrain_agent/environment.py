"""The pod's environment, read once, and the environment of each of its ranks."""

import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disttrain_agent.restart import Limits
from disttrain_agent.zygote_process import rank_defaults
from disttrain_api.agent_token import agent_token
from disttrain_api.attempt_key import attempt_key
from disttrain_api.backoff import MAX_BACKOFF_SECONDS
from disttrain_api.errors import DisttrainError
from disttrain_api.leader_address import address_proof
from disttrain_api.names import DEFAULT_GRACE_SECONDS, REPORTS_FOLDER, SCRATCH_DIR, TERMINATION_LOG, TOKEN_FILE, Env
from disttrain_api.pod_address import is_loopback
from disttrain_api.run_policy import MAX_RESTARTS


class PodError(DisttrainError):
    """The pod's environment or configuration cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True)
class PodEnvironment:
    """Facts of the pod that the agent needs."""

    node_rank: int
    ranks_here: int
    master_address: str
    config: Path | None
    """Configuration of the trainer's ranks. None: a command of the user's own, whose process has the pod's ranks."""
    scratch: Path
    grace_seconds: float
    variables: Mapping[str, str]
    job_uid: str = ""
    attempt: int = 0
    agent_port: int | None = None
    """Where the agent answers; None: nowhere."""
    restarts_in_place: Limits | None = None
    """How often ranks that fail may start again in this pod; None: a failure ends the pod."""
    workers: int = 1
    """Pods of the job."""
    gang_port: int | None = None
    """Where worker 0's agent takes the connections of the others; None: nowhere."""
    replacement: int = 0
    """Which replacement of a lost pod this one is, by a number that grows; 0: none."""
    token_file: Path | None = None
    """File of the job's token; None: it is beside the configuration."""
    memory: str | None = None
    """Where the files are that outlive its ranks (memory.py); None: there are none. No operator says it."""

    @property
    def agent_token(self) -> str | None:
        """The token of the agent's API; None if the pod has no readable token of its job."""
        return agent_token(token) if (token := self._job_token) else None

    @property
    def gang_key(self) -> bytes | None:
        """What the agents of this attempt prove to each other; None if the pod has no readable token of its job."""
        return attempt_key(token, "gang", self.job_uid, self.attempt) if (token := self._job_token) else None

    def address_proof(self, address: str, replacement: int) -> str | None:
        """Return what an address of worker 0 must come with; None if the pod has no readable token of its job."""
        token = self._job_token
        return address_proof(token, self.job_uid, self.attempt, address, replacement) if token else None

    def proves(self, proof: str, address: str, replacement: int) -> bool:
        """Return whether who says that worker 0 is at an address knows the job's token, or has it from who does."""
        expected = self.address_proof(address, replacement)
        return expected is not None and hmac.compare_digest(expected.encode(), proof.encode())

    @property
    def _job_token(self) -> str:
        file = self.token_file or (self.config.with_name(TOKEN_FILE) if self.config is not None else None)
        try:
            return file.read_text().strip() if file is not None else ""
        except (OSError, ValueError):
            return ""

    @property
    def on_loopback(self) -> bool:
        """Whether all pods of the job are processes of this machine."""
        return is_loopback(self.master_address)

    @property
    def is_master(self) -> bool:
        """Whether the master's address is this pod's own."""
        return self.node_rank == 0

    @property
    def awaits_address(self) -> bool:
        """Whether no rank starts before the master's name has an address. A program of the user's own looks for its
        peers itself. Where another pod of worker 0 is, the others hear from it and from the operator: cluster DNS may
        remember for up to 30 s that the name is missing."""
        return self.config is not None and not (self.is_master and self.replacement)

    @property
    def report_dir(self) -> Path:
        """Folder of the ranks' reports."""
        return report_dir(self.scratch)

    @property
    def ranks(self) -> range:
        """Global ranks of this pod."""
        first = self.node_rank * self.ranks_here
        return range(first, first + self.ranks_here)

    @property
    def started(self) -> range:
        """Ranks of this pod for which a process is started: the first alone where it has all of them."""
        return self.ranks if self.config is not None else self.ranks[:1]

    def of_rank(
        self, rank: int, generation: int = 0, master_port: int | None = None, master_address: str | None = None
    ) -> dict[str, str]:
        """The whole environment of the process of a rank.

        generation: how often the ranks of this attempt have started before. master_port and master_address: of this
        generation; None: that of the pod.
        """
        if master_address is not None and is_loopback(master_address) and not self.on_loopback:
            # A proxy beside the agent, as those of a service mesh, has taken the connection: ranks would meet nobody.
            master_address = None
        if self.config is None:
            return self._of_own_program(generation, master_port, master_address)
        meets = {} if master_address is None else {Env.MASTER_ADDR: master_address}
        local = meets | {
            Env.RANK: str(rank),
            Env.LOCAL_RANK: str(rank - self.ranks.start),
            Env.LOCAL_WORLD_SIZE: str(self.ranks_here),
            Env.GROUP_RANK: str(self.node_rank),
            Env.REPORT_DIR: str(self.report_dir),
        }
        if self.restarts_in_place is not None:
            local[Env.GENERATION] = str(generation)
        if self.memory is not None:
            local[Env.MEMORY] = self.memory
        return {**rank_defaults(several=self.ranks_here > 1), **self.variables, **local}

    def _of_own_program(self, generation: int, master_port: int | None, master_address: str | None) -> dict[str, str]:
        # The port of the agent's API is this process's.
        own = {name: value for name, value in self.variables.items() if name != Env.AGENT_PORT}
        own[Env.GENERATION] = str(generation)
        if master_port is not None:
            own |= {Env.MASTER_PORT: str(master_port), Env.PET_MASTER_PORT: str(master_port)}
        if master_address is not None:
            own |= {Env.MASTER_ADDR: master_address, Env.PET_MASTER_ADDR: master_address}
        if generation:
            own[Env.PET_RDZV_ID] = f"{self.variables.get(Env.PET_RDZV_ID, '')}-{generation}"
        return own


def report_dir(scratch: Path) -> Path:
    """Return the folder of the ranks' reports, in a pod with this scratch folder."""
    return scratch / REPORTS_FOLDER


def stacks_file(folder: Path, rank: int) -> Path:
    """The file into which a rank that can be asked for its stacks writes them. folder: of the reports."""
    return folder / f"rank-{rank}.stacks"


def threads_file(folder: Path, rank: int) -> Path:
    """The file into which a rank writes the stacks of all threads but its main one. folder: of the reports."""
    return folder / f"rank-{rank}.threads"


def collectives_file(folder: Path, rank: int) -> Path:
    """The file into which a rank writes its last collective calls when it is asked. folder: of the reports."""
    return folder / f"rank-{rank}.collectives"


def collectives_pipe(folder: Path, rank: int) -> Path:
    """The pipe through which a rank is asked for its last collective calls. folder: of the reports."""
    return folder / f"rank-{rank}.collectives-asked"


def meeting_file(folder: Path) -> Path:
    """The file through which ranks of this pod meet that are a world of their own. folder: of the reports."""
    return folder / "meeting"


def termination_log(variables: Mapping[str, str]) -> Path:
    """Return the path of the termination message; known even if everything else in the environment is wrong."""
    return Path(variables.get(Env.TERMINATION_LOG, TERMINATION_LOG))


def read_environment(variables: Mapping[str, str] = os.environ, *, own_program: bool = False) -> PodEnvironment:
    """The pod's environment. Raises PodError, which names the variable, where it is not the operator's."""
    ranks_here = _integer(variables, Env.LOCAL_WORLD_SIZE, minimum=1)
    node_rank = _integer(variables, Env.NODE_RANK, minimum=0)
    world_size = _integer(variables, Env.WORLD_SIZE, minimum=1)
    _integer(variables, Env.MASTER_PORT, minimum=1)
    if (node_rank + 1) * ranks_here > world_size:
        raise PodError(
            f"{Env.NODE_RANK} {node_rank} with {ranks_here} ranks per pod does not fit {Env.WORLD_SIZE} {world_size}"
        )
    return PodEnvironment(
        node_rank=node_rank,
        ranks_here=ranks_here,
        master_address=_text(variables, Env.MASTER_ADDR),
        config=None if own_program else Path(_text(variables, Env.CONFIG)),
        scratch=Path(variables.get(Env.SCRATCH, SCRATCH_DIR)),
        grace_seconds=_integer(variables, Env.GRACE_SECONDS, minimum=0, default=DEFAULT_GRACE_SECONDS),
        variables=dict(variables),
        job_uid=variables.get(Env.JOB_UID, ""),
        attempt=_integer(variables, Env.ATTEMPT, minimum=0, default=0),
        agent_port=_integer(variables, Env.AGENT_PORT, minimum=1, default=0) or None,
        restarts_in_place=_limits(variables),
        workers=world_size // ranks_here,
        gang_port=_integer(variables, Env.GANG_PORT, minimum=1, default=0) or None,
        replacement=_integer(variables, Env.REPLACEMENT, minimum=1, default=0),
        token_file=Path(variables[Env.TOKEN]) if Env.TOKEN in variables else None,
    )


def _limits(variables: Mapping[str, str]) -> Limits | None:
    if Env.RESTARTS_IN_PLACE not in variables:
        return None
    return Limits(
        restarts=_integer(variables, Env.RESTARTS_IN_PLACE, minimum=0, maximum=MAX_RESTARTS),
        backoff_seconds=_integer(variables, Env.RESTART_BACKOFF_SECONDS, minimum=0, maximum=MAX_BACKOFF_SECONDS),
    )


def check_config(path: Path) -> None:
    """Raise PodError where the ranks could not read their configuration. What it means is checked by the ranks."""
    try:
        json.loads(path.read_bytes())
    except OSError as error:
        raise PodError(f"cannot read the configuration {path} ({Env.CONFIG}): {error.strerror}") from error
    except ValueError as error:
        raise PodError(f"the configuration {path} ({Env.CONFIG}) is not JSON: {error}") from error


def _text(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name, "")
    if not value:
        raise PodError(f"the environment variable {name} must be set; the operator sets it on every pod of a job")
    return value


def _integer(
    variables: Mapping[str, str], name: str, *, minimum: int, maximum: int | None = None, default: int | None = None
) -> int:
    if default is not None and name not in variables:
        return default
    text = _text(variables, name)
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum or (maximum is not None and value > maximum):
        most = "" if maximum is None else f" and at most {maximum}"
        raise PodError(f"the environment variable {name} must be an integer of at least {minimum}{most}, not '{text}'")
    return value
