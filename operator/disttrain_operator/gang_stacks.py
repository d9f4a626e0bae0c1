"""Where the ranks of a gang are that do no step: the agents of all its workers are asked for stacks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import reduce
from operator import and_

from disttrain_api.report import decode_agent_status, decode_stacks
from disttrain_operator.agent_client import STACKS_PATH, STATUS_PATH, Agent, Ask, agent_of, live_of
from disttrain_operator.decide.observed import Stall, Suspicion
from disttrain_operator.decide.stacks import MAX_READ, blame_of, main_stack
from disttrain_operator.decide.suspicion import (
    LOOKS_APART_SECONDS,
    SLACK_SECONDS,
    Standstill,
    standstill_of,
    suspect,
)
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

_MOST_ASKED, _ASKED_AT_A_TIME = 64, 4
"""Pods of a gang whose stacks are read: each answer may have megabytes."""


class GangStacks:
    """Asks the agents of a gang where its ranks are."""

    def __init__(
        self, world: World, token_of: Callable[[str], str], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`token_of`: the token of a job's agents, by its uid. sleep: lets seconds pass."""
        self._world, self._token_of, self._sleep = world, token_of, sleep

    async def located(self, first: Agent, ask: Ask, stall: Stall) -> Stall | None:
        """Return the stall with where its rank is, and which rank holds up the others; None where the agent of the
        first worker does not say: then it is asked again. A program that is not the trainer cannot be asked."""
        if not stall.in_training:
            return stall
        stacks = await self._stacks(self._gang_of(first), ask)
        if stall.rank not in stacks:
            return None
        return replace(stall, stack=main_stack(stacks[stall.rank]), blame=blame_of(stacks))

    async def suspicion(self, first: Agent, ask: Ask) -> Suspicion | None:
        """Return which rank hangs, where the ranks of all pods stand still, as soon as that can be known; None where
        some do not, an agent does not answer, or two looks at their stacks do not tell it."""
        gang = self._gang_of(first)
        if not self._is_whole(gang) or await self._lasting(gang, ask, SLACK_SECONDS - LOOKS_APART_SECONDS) is None:
            return None
        former = blame_of(await self._stacks(gang, ask))
        if former is None:
            return None
        await self._sleep(LOOKS_APART_SECONDS)
        latter = blame_of(await self._stacks(gang, ask))
        # After both looks: what still stands still has not moved between them.
        standstill = await self._lasting(gang, ask, SLACK_SECONDS)
        return None if standstill is None else suspect(former, latter, standstill)

    def _is_whole(self, gang: list[Agent]) -> bool:
        """Whether they are the agents of all workers, as far as these are asked."""
        job = self._world.job(gang[0].job_uid) if gang else None
        return job is not None and job.spec is not None and len(gang) == min(job.spec.workers.replicas, _MOST_ASKED)

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

        async def of_pod(one: Agent) -> Standstill | None:
            try:
                status = decode_agent_status(await ask(one, self._token_of(one.job_uid), STATUS_PATH))
            except Exception as error:
                logger.debug("the agent of pod %s at %s does not answer: %r", one.pod_uid, one.host, error)
                return None
            return standstill_of(status) if status is not None and live_of(one, status) is not None else None

        found = [one for one in await asyncio.gather(*map(of_pod, gang)) if one is not None]
        return reduce(and_, found) if found and len(found) == len(gang) else None

    def _gang_of(self, first: Agent) -> list[Agent]:
        """The agents of the workers of the attempt that run, of so many as are asked."""
        key = self._world.key_of(first.job_uid)
        pods = [] if key is None else self._world.pods.group(f"{key.namespace}/{first.job_uid}")
        found = (agent_of(first.job_uid, pod, any_worker=True) for pod in pods)
        gang = [one for one in found if one is not None and one.attempt == first.attempt]
        return [one for one in gang if one.index < _MOST_ASKED]

    async def _stacks(self, gang: list[Agent], ask: Ask) -> dict[int, str]:
        """The stacks of the ranks of all pods that tell them."""
        slots = asyncio.Semaphore(_ASKED_AT_A_TIME)

        async def stacks_of(one: Agent) -> dict[int, str]:
            async with slots:
                return await self._stacks_of(one, ask)

        found = await asyncio.gather(*map(stacks_of, gang))
        return {rank: text for of_pod in found for rank, text in of_pod.items()}

    async def _stacks_of(self, agent: Agent, ask: Ask) -> dict[int, str]:
        """The stacks of the ranks of an agent's pod; none where it does not tell them."""
        job = self._world.job(agent.job_uid)
        each = job.spec.workers.ranks_per_pod if job is not None and job.spec is not None else 0
        try:
            answer = await ask(agent, self._token_of(agent.job_uid), STACKS_PATH)
        except Exception as error:
            logger.info("the agent of pod %s at %s does not tell its stacks: %r", agent.pod_uid, agent.host, error)
            return {}
        found = decode_stacks(answer, range(agent.index * each, (agent.index + 1) * each))
        # What is read of each: the answers of a gang have more than is kept at a time.
        return {rank: text[:MAX_READ] for rank, text in found.items()}
