"""Announces the address of worker 0's pod to agents that wait for it, and that of its replacement to all others.

These agents also look the name up, but the cluster's DNS may remember for a while that it was missing, or lead to the
lost pod. Each agent hears the address once. The operator tries again for a while where an agent does not answer; that
agent finds the pod by name.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from disttrain_api.agent_token import agent_token
from disttrain_api.leader_address import address_proof, leader_path
from disttrain_operator.agent_client import Agent, Ask, agent_of, ask_directly
from disttrain_operator.agent_http import Refused
from disttrain_operator.fair_queue import FairQueue
from disttrain_operator.snapshot import World, children_of

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.5
MOST = 128
"""Agents that are asked at a time; the namespaces take turns."""
MOST_TRIES = 60
"""For each agent."""
_PER_TURN = 100
"""Jobs that are looked at in one turn of the event loop."""


@dataclass
class _Announcement:
    """A pod of worker 0, and the agents that have heard of it, by the uids of their pods."""

    leader: Agent
    replacement: int
    """Which replacement it is; 0: the first pod."""
    tries: dict[str, int] = field(default_factory=dict)
    """MOST_TRIES: it knows, or does not want to."""

    def path(self, token: str) -> str:
        """The request of an announcement. token: of the job."""
        leader, address = self.leader, self.leader.host.strip("[]")
        proof = address_proof(token, leader.job_uid, leader.attempt, address, self.replacement)
        return leader_path(address, self.replacement, proof)


class LeaderAddresses:
    """Announces the address of worker 0 as soon as its container runs."""

    def __init__(
        self, world: World, token_of: Callable[[str], str], active: Callable[[], bool], ask: Ask = ask_directly
    ) -> None:
        """`token_of`: the token of a job, by its uid."""
        self._world, self._token_of, self._active, self._ask = world, token_of, active, ask
        self._announced: dict[str, _Announcement] = {}
        """By job."""
        self._asked: set[str] = set()
        """Agents that have not answered yet, by the uids of their pods."""

    async def run(self) -> None:
        """Announce addresses, round after round, until cancelled."""
        # A round does not wait for the answers of the former: one that is slow keeps no other job waiting.
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._active():
                    await self.round(tasks)
                await asyncio.sleep(ROUND_SECONDS)

    async def round(self, tasks: asyncio.TaskGroup) -> None:
        """Announce addresses to all agents that have not heard them, once, in tasks of this group."""
        line: FairQueue[tuple[_Announcement, Agent]] = FairQueue()
        announced = dict[str, _Announcement]()
        for number, uid in enumerate(self._world.looked_at()):
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
            # To read a job takes far longer than this.
            asked_for = self._world.awaits_address(uid) or self._world.has_replacements(uid)
            job = self._world.job(uid) if asked_for else None
            if job is None:
                continue
            gang = list(self._gang(job.namespace, uid, job.status.attempt))
            announcement = self._announcement(uid, gang)
            if announcement is not None:
                announced[uid] = announcement
                for agent in self._due(announcement, gang):
                    line.push(job.namespace, (announcement, agent))
        self._announced = announced
        for _ in range(min(MOST - len(self._asked), len(line))):
            announcement, agent = line.pop()
            self._asked.add(agent.pod_uid)
            tasks.create_task(self._announce(announcement, agent))

    def _announcement(self, uid: str, gang: Sequence[tuple[Agent, int]]) -> _Announcement | None:
        """The announcement of worker 0's newest pod, with who has heard it; None where no such pod runs."""
        leaders = [one for one in gang if one[0].index == 0]
        if not leaders:
            return None
        leader, replacement = max(leaders, key=lambda one: one[1])
        former = self._announced.get(uid)
        return former if former is not None and former.leader == leader else _Announcement(leader, replacement)

    def _due(self, announcement: _Announcement, gang: Iterable[tuple[Agent, int]]) -> Iterator[Agent]:
        """The agents that are to hear it now: those that wait for an address, and all workers of a replaced leader."""
        seen = self._world.last_seen(announcement.leader.job_uid)
        waiting = {pod.uid for pod in seen if pod.awaits_address is not None}
        for agent, _ in gang:
            seeks = agent.pod_uid in waiting or (announcement.replacement > 0 and agent.index > 0)
            if seeks and agent.pod_uid not in self._asked and announcement.tries.get(agent.pod_uid, 0) < MOST_TRIES:
                yield agent

    def _gang(self, namespace: str, uid: str, attempt: int) -> Iterator[tuple[Agent, int]]:
        """The agents of an attempt's workers that run, each with which replacement its pod is."""
        for pod in self._world.pods.group(children_of(namespace, uid)):
            agent = agent_of(uid, pod, any_worker=True)
            if agent is not None and agent.attempt == attempt:
                yield agent, pod["spec"].get("replacement", 0)

    async def _announce(self, announcement: _Announcement, agent: Agent) -> None:
        tries = announcement.tries.get(agent.pod_uid, 0) + 1
        try:
            token = self._token_of(agent.job_uid)
            await self._ask(agent, agent_token(token), announcement.path(token))
        except Refused as error:
            # It waits for no such pod, or is of an earlier version.
            logger.debug("the agent of pod %s does not look for %s: %s", agent.pod_uid, announcement.leader.host, error)
        except Exception as error:
            logger.debug("the agent of pod %s at %s does not answer: %r", agent.pod_uid, agent.host, error)
            announcement.tries[agent.pod_uid] = tries
            return
        finally:
            self._asked.discard(agent.pod_uid)
        announcement.tries[agent.pod_uid] = MOST_TRIES
