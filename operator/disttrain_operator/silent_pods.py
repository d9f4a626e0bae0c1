"""Whether anything answers at the addresses of pods that others of their gang miss: their agents are asked.

Nothing is asked of a gang that misses nobody. An answer, a refusal or a connection that is taken shows that the node
lives; a pod is unreachable when none of them has come for a while.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from disttrain_operator.agent_client import (
    STATUS_PATH,
    Agent,
    Ask,
    agent_of,
    ask_directly,
)
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.missed import missed
from disttrain_operator.decide.observed import Live
from disttrain_operator.fair_queue import FairQueue
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.5
MOST = 128
"""Agents that are asked in one round; the namespaces take turns."""
SILENT_SECONDS, LEAST_ASKED = 6.0, 3
"""After which, and after so many questions, a pod is unreachable. A connection has two seconds: the third question is
over seven seconds after the first."""
_PER_TURN = 100
"""Jobs that are looked at in one turn of the event loop."""


@dataclass
class _Silence:
    """Nothing has answered at a pod's address."""

    since: float
    asked: int = 0
    lost: bool = False


class SilentPods:
    """Asks the agents of pods that are missed, and keeps which of them are unreachable."""

    def __init__(
        self,
        world: World,
        token_of: Callable[[str], str],
        live_of: Callable[[str], Live | None],
        wake: Callable[[str], None],
        active: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        ask: Ask = ask_directly,
    ) -> None:
        """`token_of`, `live_of`: the token of a job's agents and what the last of them has answered, by the job's uid.
        `wake`: have a job looked at, by its uid."""
        self._world, self._token_of, self._live_of = world, token_of, live_of
        self._wake, self._active, self._clock, self._ask_with = wake, active, clock, ask
        self._silences: dict[str, dict[str, _Silence]] = {}
        """By job and pod."""
        self._heard: dict[str, Live] = {}
        """The last answer of an agent of a job: the first worker's may be among the pods that have ended since."""

    def unreachable(self, job_uid: str) -> frozenset[str]:
        """Return the uids of the job's pods that are missed and unreachable."""
        return frozenset(uid for uid, one in self._silences.get(job_uid, {}).items() if one.lost)

    async def run(self) -> None:
        """Ask, round after round, until cancelled."""
        while True:
            if self._active():
                await self.round(self._ask_with)
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self, ask: Ask) -> None:
        """Ask the agents of all pods that are missed, once."""
        line: FairQueue[Agent] = FairQueue()
        for namespace, agent in await self._missed():
            line.push(namespace, agent)
        asked = [line.pop() for _ in range(min(MOST, len(line)))]
        await asyncio.gather(*(self._ask(agent, ask) for agent in asked))

    async def _missed(self) -> list[tuple[str, Agent]]:
        """The agents of pods that are missed, with their namespaces. All others are forgotten."""
        found, silences, heard = list[tuple[str, Agent]](), dict[str, dict[str, _Silence]](), dict[str, Live]()
        for number, uid in enumerate(self._world.looked_at()):
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
            key, live = self._world.key_of(uid), self._live_of(uid) or self._heard.get(uid)
            if key is None or live is None:
                continue
            heard[uid] = live
            pods = missed(self._world.last_seen(uid), live)
            former = self._silences.get(uid, {})
            silences |= {uid: {pod.uid: former[pod.uid] for pod in pods if pod.uid in former}} if pods else {}
            raws = (self._world.pods.get(pod.uid) for pod in pods)
            agents = (agent_of(uid, raw, any_worker=True) for raw in raws if raw is not None)
            found += [(key.namespace, agent) for agent in agents if agent is not None]
        self._silences, self._heard = silences, heard
        return found

    async def _ask(self, agent: Agent, ask: Ask) -> None:
        began, silences = self._clock(), self._silences[agent.job_uid]
        try:
            await ask(agent, self._token_of(agent.job_uid), STATUS_PATH)
        except Unreachable:
            silence = silences.setdefault(agent.pod_uid, _Silence(began))
            silence.asked += 1
            if silence.lost or silence.asked < LEAST_ASKED or self._clock() - silence.since < SILENT_SECONDS:
                return
            silence.lost = True
            logger.info("nothing answers at %s, the address of pod %s, which others miss", agent.host, agent.pod_uid)
        except Exception as error:
            logger.debug("the agent of pod %s at %s is there: %r", agent.pod_uid, agent.host, error)
            silences.pop(agent.pod_uid, None)
            return
        else:
            silences.pop(agent.pod_uid, None)
            return
        self._wake(agent.job_uid)
