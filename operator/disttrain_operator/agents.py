"""How jobs are while they run: the agents of their first workers are asked, apart from all other work. Where the first
worker's agent or node is silent, another agent says how its ranks are, and whether they wait for that worker.

All jobs together are asked `per_second` times a second at most, in rounds. The figures of a job are taken once in
`interval` seconds at most: each answer may be a write of a status. Rounds in between, one a second at most, ask whether
ranks that take steps still do, so that a hang is seen early where there is time for it. An agent that does not answer
costs nothing but its figures, and is asked less and less often. What a pod answers is hostile until it is checked: its
size, its numbers, and whether it speaks of this job and attempt.
"""

import asyncio
import heapq
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial

from disttrain_api.names import CHECKPOINT_PATH
from disttrain_api.report import AgentStatus, RankReport, decode_agent_status
from disttrain_api.run_policy import LEAST_PROGRESS_DEADLINE_SECONDS
from disttrain_operator.agent_client import (
    STATUS_PATH,
    Agent,
    Ask,
    agent_of,
    ask_directly,
    live_of,
)
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.hang import exceeds, stall_of
from disttrain_operator.decide.live import Blame, Live, Stall, Suspicion
from disttrain_operator.decide.phase_clocks import idle_stall_of
from disttrain_operator.decide.reading import is_unready
from disttrain_operator.decide.suspicion import standstill_of
from disttrain_operator.gang_stacks import NOBODY, Absent, GangStacks
from disttrain_operator.kept_pod import read_pod
from disttrain_operator.kube.cache import Raw
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

AT_A_TIME = 64
TOGETHER_SECONDS = 0.05
LATE_SECONDS = 0.25
WATCH_SECONDS = 1.0
"""Between two rounds, at least."""
_MOST_SKIPPED = 32
"""Rounds for figures in which an agent that never answers is left out."""
_MOST_LOOKS = 3
"""At a gang that stands still, before it is looked at in rounds for figures alone: its clocks may differ."""
_MOST_BESIDE = 3
"""Other agents that are asked where the first worker's does not answer."""
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


class Turns:
    """So many requests a second, whatever each of them takes, and on a busy machine, too: what LATE_SECONDS leave out
    is made up for, and nothing else of a longer break.

    Those of TOGETHER_SECONDS begin at once, up to AT_A_TIME: the operator then wakes once for several, which takes half
    as long.
    """

    def __init__(self, per_second: float) -> None:
        self._apart = 1.0 / per_second
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next request, after one has begun. now: seconds of a clock that only grows."""
        self._next = max(self._next + self._apart, now - LATE_SECONDS)
        return self._next - now if self._next - now > TOGETHER_SECONDS else 0.0


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
        ask: Ask = ask_directly,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`token_of`: the token of a job's agents, by its uid. `wake`: have a job looked at, by its uid. ask: how
        agents are asked. sleep: lets seconds pass while a gang is looked at."""
        self._world, self._token_of, self._wake, self._active = world, token_of, wake, active
        self._interval, self._turns = interval, Turns(per_second)
        self._ask_with, self._stacks = ask, GangStacks(world, token_of, sleep)
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self._asked: set[str] = set()
        """Jobs whose agents have not answered yet."""
        self._live: dict[str, Live] = {}
        self._taken: dict[str, _Taken] = {}
        """The last request for a checkpoint that an agent has taken, by job."""
        self._watched: dict[str, Agent] = {}
        """Agents whose ranks take steps, and say how long these take, by job."""
        self._looks: Counter[str] = Counter()
        """How often the gang of a job that stands still was asked which rank hangs, and did not tell."""
        self._silent: set[str] = set()
        """Jobs whose first worker's agent has not answered, whether or not something is at its address."""
        self._failures: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()
        self.counts = {"agent_answers": 0.0, "agent_failures": 0.0, "agent_answers_dropped": 0.0}

    def live(self, job_uid: str) -> Live | None:
        """The last answer of a job's agent; None: there is none."""
        return self._live.get(job_uid)

    async def run(self) -> None:
        """Ask, round after round, until cancelled."""
        loop, ask = asyncio.get_running_loop(), self._ask_with
        due = loop.time()
        # A round does not wait for the answers of the former: gangs that are looked at take longer than others.
        async with asyncio.TaskGroup() as tasks:
            while True:
                began = loop.time()
                then = began + min(WATCH_SECONDS, self._interval)
                if self._active():
                    if began >= due:
                        due = began + self._interval
                        await self.round(ask, tasks)
                    else:
                        await self.watch(ask, tasks, due)
                    then = min(then, due)
                await asyncio.sleep(max(0.0, then - loop.time()))

    async def round(self, ask: Ask, tasks: asyncio.TaskGroup) -> None:
        """Ask every agent that is due once for its figures, in tasks of this group."""
        agents = [agent async for agent in self._agents()]
        self._forget_all_but({agent.job_uid for agent in agents})
        await self._ask_all([agent for agent in agents if self._is_due(agent.job_uid)], ask, self._ask, tasks)

    async def watch(self, ask: Ask, tasks: asyncio.TaskGroup, until: float = math.inf) -> None:
        """Ask every agent whose ranks take steps once whether they still do, in tasks of this group. until: time of the
        loop at which figures are due, which say that, too."""
        await self._ask_all(list(self._watched.values()), ask, self._look_again, tasks, until)

    async def _ask_all(
        self,
        agents: list[Agent],
        ask: Ask,
        asked: Callable[[Agent, Ask], Coroutine[None, None, None]],
        tasks: asyncio.TaskGroup,
        until: float = math.inf,
    ) -> None:
        loop = asyncio.get_running_loop()
        for agent in agents:
            if loop.time() >= until:
                return
            if agent.job_uid in self._asked:
                continue
            await self._slots.acquire()
            self._asked.add(agent.job_uid)
            tasks.create_task(asked(agent, ask)).add_done_callback(partial(self._answered, agent.job_uid))
            if seconds := self._turns.wait(loop.time()):
                await asyncio.sleep(seconds)

    def _answered(self, uid: str, _: asyncio.Task[None]) -> None:
        self._asked.discard(uid)
        self._slots.release()

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
        status = await self._status(agent, ask)
        live = live_of(agent, status)
        if status is None or live is None:
            await self._ask_beside(agent, ask)
            return
        self._watched.pop(uid, None)
        if any(rank.pace is not None for rank in status.ranks):
            self._watched[uid] = agent
        self._failures.pop(uid, None)
        absent = await self._at_standstill(agent, status, ask, again=True)
        request = await self._pass_on_request(agent, live, ask)
        live = replace(live, taken_request=request, **absent._asdict())
        self._keep(uid, replace(live, stall=await self._stall(agent, status, ask, absent.suspicion)))

    async def _ask_beside(self, first: Agent, ask: Ask) -> None:
        """Learn from another worker's agent how its ranks are, and whether they wait for the first one's, whose agent
        does not answer."""
        uid = first.job_uid
        for other in self._beside(first):
            try:
                status = decode_agent_status(await ask(other, self._token_of(uid), STATUS_PATH))
            except Exception as error:
                logger.debug("the agent of pod %s at %s does not answer, either: %r", other.pod_uid, other.host, error)
                continue
            live = live_of(other, status)
            if status is not None and live is not None:
                self.counts["agent_answers"] += 1
                self._failures.pop(uid, None)
                self._keep(uid, await self._of_another(first, other, status, live, ask))
                return

    async def _of_another(self, first: Agent, other: Agent, status: AgentStatus, live: Live, ask: Ask) -> Live:
        """What another worker's agent says, with what is known from before; the first one's is silent."""
        former, absent = self._live.get(first.job_uid), NOBODY
        if former is not None and former.attempt == first.attempt:
            live = replace(live, report=_gone_on(former, status))
        if standstill_of(status) is not None:
            absent = await self._stacks.absent(other, ask)
            if former is not None and former.attempt == first.attempt and former.suspicion is not None:
                absent = absent._replace(suspicion=former.suspicion)
        stall = await self._stall(other, status, ask, absent.suspicion)
        if stall is not None and stall.blame is None:
            stall = replace(stall, blame=Blame(0, "does not answer, nor does the agent of its pod"))
        return replace(live, stall=stall, **absent._asdict())

    async def _look_again(self, agent: Agent, ask: Ask) -> None:
        uid = agent.job_uid
        status, live = await self._status(agent, ask), self._live.get(uid)
        if status is None:
            await self._ask_beside(agent, ask)
            return
        if live is None or live.pod_uid != agent.pod_uid:
            return
        absent = await self._at_standstill(agent, status, ask, again=False)
        live = replace(live, **absent._asdict())
        if absent.suspicion is not None:
            # Others wait for the next round for figures.
            live = replace(live, stall=await self._stall(agent, status, ask, absent.suspicion))
        self._keep(uid, live)

    async def _status(self, agent: Agent, ask: Ask) -> AgentStatus | None:
        """What an agent answers; None: nothing that counts. It is then asked less often."""
        uid = agent.job_uid
        self._silent.discard(uid)
        try:
            answer = await ask(agent, self._token_of(uid), STATUS_PATH)
        except Exception as error:
            if isinstance(error, Unreachable | TimeoutError):
                self._silent.add(uid)
            # Whatever it is, it costs this job's figures and nothing else.
            logger.debug("the agent of pod %s at %s does not answer: %r", agent.pod_uid, agent.host, error)
            self._failed(uid, "agent_failures")
            return None
        status = decode_agent_status(answer)
        if live_of(agent, status) is None:
            self._failed(uid, "agent_answers_dropped")
            return None
        self.counts["agent_answers"] += 1
        return status

    def _keep(self, uid: str, live: Live) -> None:
        if live != self._live.get(uid):
            self._live[uid] = live
            self._wake(uid)

    async def _at_standstill(self, agent: Agent, status: AgentStatus, ask: Ask, *, again: bool) -> Absent:
        """Return which rank hangs, and which workers do not answer, where the ranks stand still; a rank stays named
        for as long as they do. again: whether a gang is looked at again after _MOST_LOOKS that named nobody, or after
        workers were found that do not answer."""
        uid, live = agent.job_uid, self._live.get(agent.job_uid)
        if standstill_of(status) is None:
            del self._looks[uid]
            return NOBODY
        known = live is not None and live.attempt == agent.attempt
        found = Absent(live.missing, live.silent, live.suspicion) if live is not None and known else NOBODY
        absent = bool(found.missing or found.silent)
        if (found.suspicion is not None and not absent) or (absent and not again):
            return found
        if self._looks[uid] >= _MOST_LOOKS and not again:
            return NOBODY
        self._looks[uid] += 1
        suspicion = await self._stacks.suspicion(agent, ask)
        return await self._stacks.absent(agent, ask) if suspicion is None else Absent(suspicion=suspicion)

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

    async def _stall(self, agent: Agent, status: AgentStatus, ask: Ask, suspicion: Suspicion | None) -> Stall | None:
        """What the ranks do that have done no step, or shown no sign of progress, for longer than their job allows."""
        stall, pauses = stall_of(status), [rank.idle.seconds for rank in status.ranks if rank.idle is not None]
        longest = max([*pauses, stall.seconds if stall is not None else 0.0])
        job = self._world.job(agent.job_uid) if longest >= LEAST_PROGRESS_DEADLINE_SECONDS else None
        if job is None or job.spec is None:
            return None
        if stall is not None and exceeds(stall, job.spec, suspicion):
            return await self._stacks.located(agent, ask, stall)
        return await self._stacks.idle(agent, ask, job.spec) if idle_stall_of(status, job.spec) is not None else None

    def _beside(self, first: Agent) -> list[Agent]:
        """The agents that are asked where the first worker's does not answer, one after the other; none where the first
        one's node reports, and something at its address answers otherwise than an agent."""
        key = self._world.key_of(first.job_uid)
        pods = [] if key is None else self._world.pods.group(f"{key.namespace}/{first.job_uid}")
        found = [(agent_of(first.job_uid, pod, any_worker=True), _is_silent(pod)) for pod in pods]
        gang = [(one, silent) for one, silent in found if one is not None and one.attempt == first.attempt]
        if (first, True) not in gang and first.job_uid not in self._silent:
            return []
        others = (one for one, silent in gang if not silent and one != first)
        return heapq.nsmallest(_MOST_BESIDE, others, key=lambda one: one.index)

    def _failed(self, uid: str, counted_as: str) -> None:
        self.counts[counted_as] += 1
        self._watched.pop(uid, None)
        self._failures[uid] += 1
        self._skips[uid] = min(2 ** min(self._failures[uid] - 1, 10) - 1, _MOST_SKIPPED)

    def _is_due(self, uid: str) -> bool:
        if self._skips[uid] <= 0:
            del self._skips[uid]
            return True
        self._skips[uid] -= 1
        return False

    def _forget_all_but(self, uids: set[str]) -> None:
        for memory in (self._live, self._watched, self._looks, self._failures, self._skips):
            for uid in [uid for uid in memory if uid not in uids]:
                del memory[uid]
        # The next attempt of the job is asked for what the former one has not written.
        self._silent &= uids
        for uid in [uid for uid in self._taken if self._world.key_of(uid) is None]:
            del self._taken[uid]


def _gone_on(former: Live, status: AgentStatus) -> RankReport | None:
    """Return what the first worker's agent has reported last, at the step that another one reports."""
    reports = [rank.report for rank in status.ranks if rank.report is not None and rank.report.total_steps]
    if former.report is None or not reports:
        return former.report
    newer = min(reports, key=lambda report: report.rank)
    changes = {name: getattr(newer, name) for name in ("step", "phase", "remaining_seconds")}
    return former.report.model_copy(update=changes)


def _is_silent(pod: Raw) -> bool:
    return is_unready(read_pod(pod)["status"])


def _is_open(now: _Taken, taken: _Taken) -> bool:
    """Whether ranks must be asked for what is requested now; taken: what some of the job took last."""
    return now.request != taken.request or (now.life != taken.life and now.checkpoint == taken.checkpoint)
