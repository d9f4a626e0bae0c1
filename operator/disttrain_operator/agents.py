"""How jobs are while they run: the agents of their first workers are asked, apart from all other work. Where the first
worker's node is silent, another agent says whether its ranks wait for that worker.

A job is asked once in `interval` seconds at most, and all jobs together `per_second` times a second: each answer may be
a write of a status. An agent that does not answer costs nothing but its figures, and is asked less and less often. What
a pod answers is hostile until it is checked: its size, its numbers, and whether it speaks of this job and attempt.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import aiohttp

from disttrain_api.names import CHECKPOINT_PATH
from disttrain_api.report import decode_agent_status
from disttrain_operator.agent_client import STATUS_PATH, Agent, Ask, agent_of, live_of, over_http
from disttrain_operator.decide.hang import MIN_SECONDS, exceeds, stall_of
from disttrain_operator.decide.observed import Live, Stall
from disttrain_operator.decide.reading import is_unready
from disttrain_operator.gang_stacks import GangStacks
from disttrain_operator.kept_pod import read_pod
from disttrain_operator.kube.cache import Raw
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

AT_A_TIME = 64
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 2.0
_MOST_SKIPPED = 32
"""Rounds in which an agent that never answers is left out."""
_PER_TURN = 100
"""Jobs that are looked at in one turn of the event loop."""


@dataclass(frozen=True)
class _Taken:
    """A request for a checkpoint that the ranks have taken."""

    request: str
    life: tuple[int, int]
    """The attempt of the ranks that have taken it, and how often they had restarted in place."""
    checkpoint: int | None
    """Step of the newest checkpoint that was known then."""


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
        self._ask_with, self._stacks = ask, GangStacks(world, token_of)
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
            ask = self._ask_with or over_http(session)
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
            answer = await ask(agent, self._token_of(uid), STATUS_PATH)
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
            live = replace(live, stall=await self._stacks.located(agent, ask, stall))
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

    def _beside(self, first: Agent) -> Agent | None:
        """The agent that is asked where the first worker's does not answer; None where the first one's node reports."""
        key = self._world.key_of(first.job_uid)
        pods = [] if key is None else self._world.pods.group(f"{key.namespace}/{first.job_uid}")
        found = [(agent_of(first.job_uid, pod, any_worker=True), _is_silent(pod)) for pod in pods]
        gang = [(one, silent) for one, silent in found if one is not None and one.attempt == first.attempt]
        if (first, True) not in gang:
            return None
        return min((one for one, silent in gang if not silent), key=lambda one: one.index, default=None)

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
