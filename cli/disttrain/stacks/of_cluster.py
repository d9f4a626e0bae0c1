"""Stacks of a job's ranks on a cluster: its agents are asked through the API server's proxy.

What they are asked with is in the job's Secret. So this takes `get` on Secrets and on `pods/proxy`, which the role
`edit` has and the role `view` does not.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from disttrain.cluster.api import Api
from disttrain.cluster.paths import path_of
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain.logs.pick import Pick, PodLog, picked
from disttrain_api.agent_api import STACKS
from disttrain_api.agent_token import agent_token
from disttrain_api.moved import carried_over
from disttrain_api.names import (
    AGENT_PORT,
    CONFIG_VOLUME,
    HOST_AGENT_PORTS,
    TOKEN_FILE,
    TOKEN_HEADER,
    Role,
)
from disttrain_api.spec import JobSpec
from disttrain_api.stacks import MAX_WHOLE_STACKS_BYTES, decode_stacks, main_thread_first
from disttrain_operator.decide.stacks import in_one_group
from disttrain_operator.kept_pod import agent_in

Raw = Mapping[str, Any]

_AT_A_TIME = 8
_OF_OWN_COMMAND = (
    "; a command of one's own has an agent from its first `disttrain.report`, or `restore` of a session, on"
)


@dataclass(frozen=True)
class Stacks:
    """What was learned."""

    found: Mapping[int, str] = field(default_factory=dict)
    """Text of each rank that has one: the calls of all threads, the main one's first."""
    missing: tuple[str, ...] = ()
    """A sentence for each pod that did not give any."""
    whole: bool = False
    """Whether these are all ranks of the job."""
    together: bool = False
    """Whether all ranks take part in the same collective calls, as `in_one_group` has it."""


@dataclass(frozen=True)
class _Agent:
    pod: PodLog
    port: int
    secret: str


def stacks_of(api: Api, job: RemoteJob, pods: Iterable[Raw], ranks: frozenset[int] | None = None) -> Stacks:
    """Return the stacks of these ranks of the attempt that runs (None: of all).

    Raises CommandError where no pod can be asked.
    """
    by_name = {str(pod["metadata"]["name"]): pod for pod in pods}
    meant = picked(by_name.values(), job.raw.get("spec"), Pick(ranks, job.status.attempt))
    running = [pod for pod in meant if pod.role is Role.WORKER and pod.started and not pod.ended]
    if not running:
        raise CommandError(f"no worker of {job.name}{' with these ranks' if ranks else ''} runs now")
    agents = [agent for pod in running if (agent := _agent_of(pod, by_name[pod.name])) is not None]
    if not agents:
        raise CommandError(f"the pods of {job.name} have no agent: an operator of an earlier release has made them")
    own = not (job.raw.get("spec") or {}).get("training")
    tokens = {name: _token(api, job.namespace, name) for name in {agent.secret for agent in agents}}

    def ask(agent: _Agent) -> dict[int, str] | str:
        path = path_of("/api/v1", "pods", job.namespace, f"{agent.pod.name}:{agent.port}", "proxy")
        headers = {TOKEN_HEADER: tokens[agent.secret]}
        try:
            answer = api.through(
                f"{path}{STACKS.path}", headers, most=MAX_WHOLE_STACKS_BYTES, what=f"pod {agent.pod.name}"
            )
        except CommandError as error:
            return f"{error}{_OF_OWN_COMMAND}" if own else str(error)
        found = decode_stacks(answer, agent.pod.ranks, MAX_WHOLE_STACKS_BYTES)
        return found or f"pod {agent.pod.name}: its ranks give no stacks now"

    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        answers = list(threads.map(ask, agents))
    texts = {rank: text for answer in answers if isinstance(answer, dict) for rank, text in answer.items()}
    found = {rank: main_thread_first(texts[rank]) for rank in sorted(texts) if ranks is None or rank in ranks}
    spec = _spec(job)
    return Stacks(
        found,
        tuple(answer for answer in answers if isinstance(answer, str)),
        whole=spec is not None and len(found) == spec.world_size,
        together=spec is not None and in_one_group(spec),
    )


def _spec(job: RemoteJob) -> JobSpec | None:
    """The job's spec; None where this version cannot read it."""
    try:
        return JobSpec.model_validate(carried_over(job.raw.get("spec"))[0])
    except ValidationError:
        return None


def _agent_of(pod: PodLog, raw: Raw) -> _Agent | None:
    """Return the agent of a pod; None where it has none. Whatever a pod says leads to a port of its own alone."""
    spec = raw.get("spec") or {}
    port = agent_in(spec, raw.get("status") or {}).get("agentPort")
    volume: Raw = next((one for one in reversed(spec.get("volumes") or []) if one.get("name") == CONFIG_VOLUME), {})
    secret = (volume.get("secret") or {}).get("secretName")
    if not secret or port is None or (port != AGENT_PORT and port not in HOST_AGENT_PORTS):
        return None
    return _Agent(pod, port, str(secret))


def _token(api: Api, namespace: str, secret: str) -> str:
    """Return what the agents of the Secret's job are asked with."""
    what = f"cannot read the Secret {secret}, which has the token of the job's agents"
    held = (api.get(path_of("/api/v1", "secrets", namespace, secret), what=what).get("data") or {}).get(TOKEN_FILE)
    try:
        return agent_token(base64.b64decode(str(held), validate=True).decode())
    except (binascii.Error, UnicodeDecodeError) as error:
        raise CommandError(f"{what}: its `{TOKEN_FILE}` is no token") from error
