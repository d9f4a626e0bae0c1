"""Where the ranks of a gang are that do no step: the agents of all its workers are asked for stacks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import NamedTuple, TypeVar

from disttrain_api.report import decode_agent_status
from disttrain_api.spec import JobSpec
from disttrain_api.stacks import MAX_STACK_BYTES, MAX_STACKS_ANSWER_BYTES, decode_stacks, main_thread
from disttrain_operator.agent_client import STACKS_PATH, STATUS_PATH, Agent, Ask, agent_of, live_of
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.collectives import where_groups_are
from disttrain_operator.decide.live import Blame, Stall, Suspicion
from disttrain_operator.decide.phase_clocks import idle_stall_of, together
from disttrain_operator.decide.reading import is_unready
from disttrain_operator.decide.stacks import blame_of, in_one_group, main_stack, wait_for_others
from disttrain_operator.decide.suspicion import (
    LOOKS_APART_SECONDS,
    SLACK_SECONDS,
    Standstill,
    standstill_of,
    suspect,
)
from disttrain_operator.kept_pod import read_pod
from disttrain_operator.kube.slots import Slots
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

MOST_PODS = 128
"""Pods of a gang that are asked at most: 1,024 ranks in pods of 8."""
AT_A_TIME, _MOST_BYTES = 128, MAX_STACKS_ANSWER_BYTES
"""Agents of all gangs that are asked, and what each may answer: 32 MiB together. So a gang is asked at once."""
GANGS_AT_A_TIME, _MOST_LETTERS = 4, 8 * 2**20
"""Gangs whose stacks are kept until all of their agents have answered, and what is kept of each."""

Found = TypeVar("Found")


class Absent(NamedTuple):
    """Workers that those of their gang miss whose agents answer."""

    missing: frozenset[int] = frozenset()
    """Nothing answers at their addresses."""
    silent: frozenset[int] = frozenset()
    """Something is there, and their agents do not answer."""
    suspicion: Suspicion | None = None
    """Their first rank, if one is silent and the others have stood still for long."""


NOBODY = Absent()


class GangStacks:
    """Asks the agents of gangs where their ranks are. The namespaces of the gangs take turns."""

    def __init__(
        self, world: World, token_of: Callable[[str], str], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`token_of`: the token of a job's agents, by its uid. sleep: lets seconds pass."""
        self._world, self._token_of, self._sleep = world, token_of, sleep
        self._agents, self._gangs = Slots(AT_A_TIME), Slots(GANGS_AT_A_TIME)

    async def located(self, first: Agent, ask: Ask, stall: Stall) -> Stall | None:
        """Return the stall with where its rank is, and which rank holds up the others; None where the agent of the
        first worker does not say: then it is asked again. A program that is not the trainer cannot be asked."""
        if not stall.in_training:
            return stall
        gang, each = self._gang_of(first), self._ranks_per_pod(first)
        absent, blame = dict.fromkeys((one.index * each for one in gang), ""), self._blame(first)

        def located(stacks: Mapping[int, str]) -> Stall | None:
            if stall.rank not in stacks:
                return None
            # Where all that answer wait, it is for those of a pod that does not.
            all_ranks = {**absent, **stacks} if wait_for_others(stacks) else stacks
            stack, recorded = main_stack(stacks[stall.rank]), where_groups_are(stacks)
            return replace(stall, stack=stack, blame=blame(all_ranks), recorded=recorded)

        return await self._in_stacks(gang, ask, located)

    async def idle(self, first: Agent, ask: Ask, spec: JobSpec) -> Stall | None:
        """Return how long no rank of any pod has shown a sign that it gets on, where that is too long for all of them,
        and where they are; None where one has, or an agent does not answer."""
        gang = self._gang_of(first)
        if not self._is_whole(gang):
            return None
        found = await asyncio.gather(*(self._idle_of(one, ask, spec) for one in gang))
        known = [stall for stall in found if stall is not None]
        return await self.located(first, ask, together(known)) if len(known) == len(found) else None

    async def suspicion(self, first: Agent, ask: Ask) -> Suspicion | None:
        """Return which rank hangs, where the ranks of all pods stand still, as soon as that can be known; None where
        some do not, an agent does not answer, or two looks at their stacks do not tell it."""
        gang, blame = self._gang_of(first), self._blame(first)
        if not self._is_whole(gang) or await self._lasting(gang, ask, SLACK_SECONDS - LOOKS_APART_SECONDS) is None:
            return None
        # From begin to begin: how long a look takes depends on the gang.
        passes = asyncio.ensure_future(self._sleep(LOOKS_APART_SECONDS))
        try:
            if (former := await self._in_stacks(gang, ask, blame)) is None:
                return None
            await passes
        finally:
            passes.cancel()
        latter = await self._in_stacks(gang, ask, blame)
        # After both looks: what still stands still has not moved between them.
        standstill = await self._lasting(gang, ask, SLACK_SECONDS)
        return None if standstill is None else suspect(former, latter, standstill)

    async def absent(self, first: Agent, ask: Ask) -> Absent:
        """Return the workers whose agents do not answer, while the ranks of all others stand still and wait for other
        ranks; none where any other rank does something else, or an agent answers otherwise."""
        gang = self._gang_of(first)
        if not self._is_whole(gang):
            return NOBODY
        paces = dict(zip(gang, await asyncio.gather(*(self._pace_of(one, ask) for one in gang)), strict=True))
        missing = frozenset(one.index for one, pace in paces.items() if isinstance(pace, Unreachable))
        silent = frozenset(one.index for one, pace in paces.items() if isinstance(pace, TimeoutError))
        others = {one: pace for one, pace in paces.items() if isinstance(pace, Standstill)}
        if not (missing or silent) or not others or None in paces.values():
            return NOBODY
        each, still = self._ranks_per_pod(first), reduce(and_, others.values())

        def of_waiting(stacks: Mapping[int, str]) -> Absent:
            if len(stacks) != each * len(others) or not wait_for_others(stacks):
                return NOBODY
            ranks = [one.index * each for one in paces if one.index in silent and self._is_ready(one)]
            blame = self._blame(first)({**stacks, **dict.fromkeys(ranks, "")}) if ranks else None
            return Absent(missing, silent, suspect(blame, blame, still))

        return await self._in_stacks(list(others), ask, of_waiting)

    def _blame(self, first: Agent) -> Callable[[Mapping[int, str]], Blame | None]:
        """How the stacks of the ranks of this job are read."""
        job = self._world.job(first.job_uid)
        spec = job.spec if job is not None else None
        ranks, together = (spec.world_size, in_one_group(spec)) if spec is not None else (0, False)
        return lambda stacks: blame_of(stacks, whole=len(stacks) == ranks, together=together)

    def _is_whole(self, gang: list[Agent]) -> bool:
        """Whether they are the agents of all workers, as far as these are asked."""
        job = self._world.job(gang[0].job_uid) if gang else None
        return job is not None and job.spec is not None and len(gang) == min(job.spec.workers.replicas, MOST_PODS)

    async def _lasting(self, gang: list[Agent], ask: Ask, slack: float) -> Standstill | None:
        """Wait until no rank of any pod has ended a step for `slack` longer than their own steps take; None where one
        ends a step meanwhile, or an agent does not answer."""
        found = await self._standstill(gang, ask)
        if found is None or (left := found.left(slack)) <= 0:
            return found
        await self._sleep(left)
        return await self._standstill(gang, ask)

    async def _standstill(self, gang: list[Agent], ask: Ask) -> Standstill | None:
        """How long no rank of any pod has ended a step; None where one has, or an agent does not say."""

        paces = await asyncio.gather(*(self._pace_of(one, ask) for one in gang))
        found = [pace for pace in paces if isinstance(pace, Standstill)]
        return reduce(and_, found) if found and len(found) == len(gang) else None

    async def _pace_of(self, agent: Agent, ask: Ask) -> Standstill | Unreachable | TimeoutError | None:
        """How long the ranks of an agent's pod have ended no step; None where they have, or it does not say. An error:
        it does not answer."""
        try:
            status = decode_agent_status(await self._answer(agent, ask, STATUS_PATH))
        except Exception as error:
            logger.debug("the agent of pod %s at %s does not answer: %r", agent.pod_uid, agent.host, error)
            return error if isinstance(error, Unreachable | TimeoutError) else None
        return standstill_of(status) if status is not None and live_of(agent, status) is not None else None

    async def _idle_of(self, agent: Agent, ask: Ask, spec: JobSpec) -> Stall | None:
        try:
            status = decode_agent_status(await self._answer(agent, ask, STATUS_PATH))
        except Exception as error:
            logger.debug("the agent of pod %s at %s does not answer: %r", agent.pod_uid, agent.host, error)
            return None
        return idle_stall_of(status, spec) if status is not None and live_of(agent, status) is not None else None

    def _gang_of(self, first: Agent) -> list[Agent]:
        """The agents of the workers of the attempt that run, of so many as are asked."""
        key = self._world.key_of(first.job_uid)
        pods = [] if key is None else self._world.pods.group(f"{key.namespace}/{first.job_uid}")
        found = (agent_of(first.job_uid, pod, any_worker=True) for pod in pods)
        gang = [one for one in found if one is not None and one.attempt == first.attempt]
        return [replace(one, most_bytes=_MOST_BYTES) for one in gang if one.index < MOST_PODS]

    async def _in_stacks(self, gang: list[Agent], ask: Ask, read: Callable[[Mapping[int, str]], Found]) -> Found:
        """What is read in the stacks of the ranks of all pods that tell them."""
        async with self._gangs.of(self._namespace(gang)):
            found = await asyncio.gather(*(self._stacks_of(one, ask, len(gang)) for one in gang))
            return read({rank: text for of_pod in found for rank, text in of_pod.items()})

    async def _stacks_of(self, agent: Agent, ask: Ask, pods: int) -> dict[int, str]:
        """The main stacks of the ranks of an agent's pod; none where it does not tell them. pods: of the gang."""
        each = self._ranks_per_pod(agent)
        try:
            answer = await self._answer(agent, ask, STACKS_PATH)
        except Exception as error:
            logger.info("the agent of pod %s at %s does not tell its stacks: %r", agent.pod_uid, agent.host, error)
            return {}
        found = decode_stacks(answer, range(agent.index * each, (agent.index + 1) * each))
        # Agents of earlier versions answer with all threads.
        letters = min(MAX_STACK_BYTES, _MOST_LETTERS // max(1, pods * each))
        return {rank: main_thread(text, each)[:letters] for rank, text in found.items()}

    async def _answer(self, agent: Agent, ask: Ask, path: str) -> bytes:
        async with self._agents.of(self._namespace([agent])):
            return await ask(agent, self._token_of(agent.job_uid), path)

    def _is_ready(self, agent: Agent) -> bool:
        """Whether its node reports, as far as Kubernetes has noticed."""
        raw = self._world.pods.get(agent.pod_uid)
        return raw is not None and not is_unready(read_pod(raw)["status"])

    def _ranks_per_pod(self, agent: Agent) -> int:
        job = self._world.job(agent.job_uid)
        return job.spec.workers.ranks_per_pod if job is not None and job.spec is not None else 0

    def _namespace(self, gang: list[Agent]) -> str:
        key = self._world.key_of(gang[0].job_uid) if gang else None
        return "" if key is None else key.namespace
