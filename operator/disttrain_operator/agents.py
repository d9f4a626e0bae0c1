"""How jobs are while they run: the agents of their first workers are asked, apart from all other work. Where the first
worker's node is silent, another agent says whether its ranks wait for that worker.

A job is asked once in `interval` seconds at most, and all jobs together `per_second` times a second: each answer may be
a write of a status. An agent that does not answer costs nothing but its figures, and is asked less and less often. What
a pod answers is hostile until it is checked: its size, its numbers, and whether it speaks of this job and attempt.
"""

import asyncio
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import aiohttp

from disttrain_api.names import AGENT_PORT, CHECKPOINT_PATH, HOST_AGENT_PORTS, TOKEN_HEADER, Label, Role
from disttrain_api.report import (
    MAX_AGENT_ANSWER_BYTES,
    MAX_STACKS_ANSWER_BYTES,
    AgentStatus,
    decode_agent_status,
    decode_stacks,
)
from disttrain_operator.decide.hang import MIN_SECONDS, exceeds, stall_of
from disttrain_operator.decide.observed import Live, Stall
from disttrain_operator.decide.reading import is_unready
from disttrain_operator.decide.stacks import MAX_READ, blame_of, main_stack
from disttrain_operator.kept_pod import read_pod
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.client import read_body
from disttrain_operator.snapshot import World

_NUMBER = re.compile("[0-9]{1,9}")
logger = logging.getLogger(__name__)

AT_A_TIME = 64
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 2.0
_MOST_SKIPPED = 32
"""Rounds in which an agent that never answers is left out."""
_PER_TURN = 100
"""Jobs that are looked at in one turn of the event loop."""
_MOST_LOCATED, _LOCATED_AT_A_TIME = 64, 4
"""Pods of a gang that hangs whose stacks are read: each answer may have megabytes."""


@dataclass(frozen=True)
class Agent:
    """The agent of a worker; of all workers only the first is asked how the job is."""

    job_uid: str
    pod_uid: str
    attempt: int
    host: str
    port: int
    index: int = 0
    """Number of the worker."""


@dataclass(frozen=True)
class _Taken:
    """A request for a checkpoint that the ranks have taken."""

    request: str
    life: tuple[int, int]
    """The attempt of the ranks that have taken it, and how often they had restarted in place."""
    checkpoint: int | None
    """Step of the newest checkpoint that was known then."""


Ask = Callable[[Agent, str, str], Awaitable[bytes]]
"""(agent, token, path) -> what it answers. Raises whatever keeps the answer away."""
_STATUS, _STACKS = "/v1/status", "/v1/stacks"
_MOST_BYTES = {_STATUS: MAX_AGENT_ANSWER_BYTES, _STACKS: MAX_STACKS_ANSWER_BYTES, CHECKPOINT_PATH: 4096}


class Agents:
    """Asks agents, and keeps the last answer of each job that runs."""

    def __init__(
        self,
        world: World,
        token_of: Callable[[str], str],
        wake: Callable[[str], None],
        active: Callable[[], bool],
        *,
        interval: float,
        per_second: float,
        ask: Ask | None = None,
    ) -> None:
        """`token_of`: the token of a job's agents, by its uid. `wake`: have a job looked at, by its uid."""
        self._world, self._token_of, self._wake, self._active = world, token_of, wake, active
        self._interval, self._pause = interval, 1.0 / per_second
        self._ask_with = ask
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self._live: dict[str, Live] = {}
        self._taken: dict[str, _Taken] = {}
        """The last request for a checkpoint that an agent has taken, by job."""
        self._failures: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()
        self.counts = {"agent_answers": 0.0, "agent_failures": 0.0, "agent_answers_dropped": 0.0}

    def live(self, job_uid: str) -> Live | None:
        """The last answer of a job's agent; None: there is none."""
        return self._live.get(job_uid)

    async def run(self) -> None:
        """Ask, round after round, until cancelled."""
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS),
            # What is compressed could become any length.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as session:
            ask = self._ask_with or _over_http(session)
            while True:
                began = loop.time()
                if self._active():
                    await self.round(ask)
                await asyncio.sleep(max(0.0, began + self._interval - loop.time()))

    async def round(self, ask: Ask) -> None:
        """Ask every agent that is due once; returns when all have answered or failed."""
        agents = [agent async for agent in self._agents()]
        self._forget_all_but({agent.job_uid for agent in agents})
        async with asyncio.TaskGroup() as tasks:
            for agent in agents:
                if not self._is_due(agent.job_uid):
                    continue
                await self._slots.acquire()
                tasks.create_task(self._ask(agent, ask)).add_done_callback(lambda _: self._slots.release())
                await asyncio.sleep(self._pause)

    async def _agents(self) -> AsyncIterator[Agent]:
        for number, group in enumerate(self._world.pods.groups()):
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
            owner = self._world.owner(group)
            newest = max(
                (agent for pod in self._world.pods.group(group) if owner and (agent := agent_of(owner.uid, pod))),
                key=lambda agent: agent.attempt,
                default=None,
            )
            if newest is not None:
                yield newest

    async def _ask(self, agent: Agent, ask: Ask) -> None:
        uid = agent.job_uid
        try:
            answer = await ask(agent, self._token_of(uid), _STATUS)
        except Exception as error:
            # Whatever it is, it costs this job's figures and nothing else.
            logger.debug("the agent of pod %s at %s does not answer: %r", agent.pod_uid, agent.host, error)
            if agent.index == 0:
                self._failed(uid, "agent_failures")
                if (other := self._beside(agent)) is not None:
                    await self._ask(other, ask)
            return
        status = decode_agent_status(answer)
        live = live_of(agent, status)
        if live is None:
            self._failed(uid, "agent_answers_dropped")
            return
        self.counts["agent_answers"] += 1
        self._failures.pop(uid, None)
        if agent.index == 0:
            live = replace(live, taken_request=await self._pass_on_request(agent, live, ask))
        stall = stall_of(status) if status is not None and agent.index == 0 else None
        if stall is not None and self._exceeds(uid, stall):
            live = replace(live, stall=await self._located(agent, ask, stall))
        if live != self._live.get(uid):
            self._live[uid] = live
            self._wake(uid)

    async def _pass_on_request(self, agent: Agent, live: Live, ask: Ask) -> str | None:
        """Ask the ranks for a checkpoint where somebody has asked the job for another one since, or the ranks that took
        the request have ended without one; returns the last request that these ranks have taken."""
        uid = agent.job_uid
        request, taken = self._world.checkpoint_request(uid), self._taken.get(uid)
        restarts = live.restarts_in_place.count if live.restarts_in_place is not None else 0
        now = None if request is None else _Taken(request, (agent.attempt, restarts), self._checkpoint(uid))
        if now is not None and (taken is None or _is_open(now, taken)):
            try:
                await ask(agent, self._token_of(uid), CHECKPOINT_PATH)
                taken = self._taken[uid] = now
            except Exception as error:
                # It is asked again with the next answer: ranks that start do not take requests yet.
                logger.debug("the agent of pod %s at %s takes no request: %r", agent.pod_uid, agent.host, error)
        return taken.request if taken is not None and taken.life[0] == agent.attempt else None

    def _checkpoint(self, uid: str) -> int | None:
        job = self._world.job(uid)
        return job.status.checkpoint.step if job is not None and job.status.checkpoint is not None else None

    def _exceeds(self, uid: str, stall: Stall) -> bool:
        job = self._world.job(uid) if stall.seconds >= MIN_SECONDS else None
        return job is not None and job.spec is not None and exceeds(stall, job.spec)

    async def _located(self, agent: Agent, ask: Ask, stall: Stall) -> Stall | None:
        """The stall with where its rank is, and which rank holds up the others; None where the agent of the first
        worker does not say: then it is asked again. A program that is not the trainer cannot be asked."""
        if not stall.in_training:
            return stall
        slots = asyncio.Semaphore(_LOCATED_AT_A_TIME)

        async def stacks_of(one: Agent) -> dict[int, str]:
            async with slots:
                return await self._stacks(one, ask)

        gang = [one for one in self._gang_of(agent) if one.index < _MOST_LOCATED]
        found = await asyncio.gather(*map(stacks_of, gang))
        stacks = {rank: text for of_pod in found for rank, text in of_pod.items()}
        if stall.rank not in stacks:
            return None
        return replace(stall, stack=main_stack(stacks[stall.rank]), blame=blame_of(stacks))

    def _gang_of(self, first: Agent) -> list[Agent]:
        """The agents of all workers of the attempt that run."""
        return [one for one, _ in self._pods_of(first)]

    def _pods_of(self, first: Agent) -> list[tuple[Agent, Raw]]:
        """The agents of all workers of the attempt that run, with their kept pods."""
        key = self._world.key_of(first.job_uid)
        pods = [] if key is None else self._world.pods.group(f"{key.namespace}/{first.job_uid}")
        found = ((agent_of(first.job_uid, pod, any_worker=True), pod) for pod in pods)
        return [(one, pod) for one, pod in found if one is not None and one.attempt == first.attempt]

    def _beside(self, first: Agent) -> Agent | None:
        """The agent that is asked where the first worker's does not answer; None where the first one's node reports."""
        gang = sorted(self._pods_of(first), key=lambda entry: entry[0].index)
        if not any(one == first and _is_silent(pod) for one, pod in gang):
            return None
        return next((one for one, pod in gang if not _is_silent(pod)), None)

    async def _stacks(self, agent: Agent, ask: Ask) -> dict[int, str]:
        """The stacks of the ranks of an agent's pod; none where it does not tell them."""
        job = self._world.job(agent.job_uid)
        each = job.spec.workers.ranks_per_pod if job is not None and job.spec is not None else 0
        try:
            answer = await ask(agent, self._token_of(agent.job_uid), _STACKS)
        except Exception as error:
            logger.info("the agent of pod %s at %s does not tell its stacks: %r", agent.pod_uid, agent.host, error)
            return {}
        found = decode_stacks(answer, range(agent.index * each, (agent.index + 1) * each))
        # What is read of each: the answers of a gang have more than is kept at a time.
        return {rank: text[:MAX_READ] for rank, text in found.items()}

    def _failed(self, uid: str, counted_as: str) -> None:
        self.counts[counted_as] += 1
        self._failures[uid] += 1
        self._skips[uid] = min(2 ** min(self._failures[uid] - 1, 10) - 1, _MOST_SKIPPED)

    def _is_due(self, uid: str) -> bool:
        if self._skips[uid] <= 0:
            del self._skips[uid]
            return True
        self._skips[uid] -= 1
        return False

    def _forget_all_but(self, uids: set[str]) -> None:
        for memory in (self._live, self._failures, self._skips):
            for uid in [uid for uid in memory if uid not in uids]:
                del memory[uid]
        # The next attempt of the job is asked for what the former one has not written.
        for uid in [uid for uid in self._taken if self._world.key_of(uid) is None]:
            del self._taken[uid]


def _is_silent(pod: Raw) -> bool:
    return is_unready(read_pod(pod)["status"])


def _is_open(now: _Taken, taken: _Taken) -> bool:
    """Whether ranks must be asked for what is requested now; taken: what some of the job took last."""
    return now.request != taken.request or (now.life != taken.life and now.checkpoint == taken.checkpoint)


def agent_of(job_uid: str, pod: Raw, *, any_worker: bool = False) -> Agent | None:
    """Return the agent of a raw pod that runs; None where it has none, or is not its job's first worker."""
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    port, attempt, index = pod["spec"].get("agentPort"), labels.get(Label.ATTEMPT, ""), labels.get(Label.INDEX, "")
    is_one = labels.get(Label.ROLE) == Role.WORKER.value and (_NUMBER.fullmatch(index) if any_worker else index == "0")
    if not is_one or status.get("phase") != "Running" or not _NUMBER.fullmatch(attempt):
        return None
    host = _address(status.get("podIP"))
    if host is None or (port != AGENT_PORT and port not in HOST_AGENT_PORTS):
        return None
    return Agent(job_uid, pod["metadata"]["uid"], int(attempt), host, port, int(index))


def _address(text: object) -> str | None:
    """Return an address that can be a pod's, as it stands in a URL; the operator's own machine is none."""
    try:
        address = ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        return None
    if address is None or address.is_loopback or address.is_link_local or address.is_multicast:
        return None
    if address.is_unspecified or getattr(address, "ipv4_mapped", None) or getattr(address, "scope_id", None):
        return None
    return f"[{address}]" if address.version == 6 else str(address)


def live_of(agent: Agent, status: AgentStatus | None) -> Live | None:
    """Return what an answer says of the job; None where it is no answer, or one of another job or attempt."""
    if status is None or (status.job_uid, status.attempt) != (agent.job_uid, agent.attempt):
        return None
    awaited = frozenset(status.awaited)
    if agent.index:
        return Live(agent.pod_uid, agent.attempt, None, awaited=awaited & {0})
    reports = [rank.report for rank in status.ranks if rank.report is not None and rank.report.total_steps]
    first = min(reports, key=lambda report: report.rank, default=None)
    return Live(agent.pod_uid, agent.attempt, first, restarts_in_place=status.restarts_in_place, awaited=awaited)


def _over_http(session: aiohttp.ClientSession) -> Ask:
    async def ask(agent: Agent, token: str, path: str) -> bytes:
        url, headers = f"http://{agent.host}:{agent.port}{path}", {TOKEN_HEADER: token}
        method = "POST" if path == CHECKPOINT_PATH else "GET"
        async with session.request(method, url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"it answers {response.status}")
            return await read_body(response, _MOST_BYTES[path])

    return ask
