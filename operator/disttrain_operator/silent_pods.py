"""Whether anything answers at the addresses of pods that others of their gang miss: their agents are asked.

Nothing is asked of a gang that misses nobody. An answer, a refusal or a connection that is taken shows that the node's
kernel lives; a pod is unreachable when none of them has come for a while. Where connections are taken and nobody
answers, the pod's processes may be stopped, or the whole node: the pod is silent once something else of that node has
answered, or so long after that Kubernetes had called the node not ready.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from disttrain_operator.agent_client import (
    CONNECT_SECONDS,
    STATUS_PATH,
    Agent,
    Ask,
    agent_of,
    ask_directly,
)
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.missed import is_up, missed
from disttrain_operator.fair_queue import FairQueue
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.5
MOST = 128
"""Agents that are asked in one round; the namespaces take turns."""
SILENT_SECONDS, LEAST_ASKED = 6.0, 3
"""After which, and after so many questions, a pod is unreachable. A connection has two seconds: the third question is
over seven seconds after the first."""
UNANSWERED_SECONDS, UNSEEN_SECONDS = 30.0, 60.0
"""After which a pod is silent that has an address: where another pod of its node answers, and where there is none.
Kubernetes calls a node not ready after 40 s or 50 s without a sign of life."""
ANSWER_SECONDS = CONNECT_SECONDS + 0.5
"""One that does not answer must not delay what is known of others."""
_WITNESSES = 3
"""Other pods of a node that are asked at once."""
_PER_TURN = 100
"""Jobs that are looked at in one turn of the event loop."""


@dataclass
class _Silence:
    """Nobody has answered at a pod's address."""

    is_there: bool
    """Whether connections are taken."""
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
        return self._lost(job_uid, is_there=False)

    def silent(self, job_uid: str) -> frozenset[str]:
        """Return the uids of the job's pods that are missed, and whose agents are silent though their nodes live."""
        return self._lost(job_uid, is_there=True)

    def _lost(self, job_uid: str, *, is_there: bool) -> frozenset[str]:
        silences = self._silences.get(job_uid, {})
        return frozenset(uid for uid, one in silences.items() if one.lost and one.is_there is is_there)

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
            if self._world.simply_runs(uid) and not (live.awaited or live.missing or live.silent):
                continue
            # Nothing more has to be learned of a node that Kubernetes calls not ready.
            pods = [pod for pod in missed(self._world.last_seen(uid), live) if not pod.cut_off]
            former = self._silences.get(uid, {})
            silences |= {uid: {pod.uid: former[pod.uid] for pod in pods if pod.uid in former}} if pods else {}
            raws = (self._world.pods.get(pod.uid) for pod in pods)
            agents = (agent_of(uid, raw, any_worker=True) for raw in raws if raw is not None)
            found += [(key.namespace, agent) for agent in agents if agent is not None]
        self._silences, self._heard = silences, heard
        return found

    async def _ask(self, agent: Agent, ask: Ask) -> None:
        began, silences = self._clock(), self._silences[agent.job_uid]
        is_there = await self._is_there(agent, ask)
        if is_there is None:
            silences.pop(agent.pod_uid, None)
            return
        silence = silences.get(agent.pod_uid)
        if silence is None or silence.is_there is not is_there:
            silence = silences[agent.pod_uid] = _Silence(is_there, began)
        silence.asked += 1
        seconds = self._clock() - silence.since
        if silence.lost or silence.asked < LEAST_ASKED:
            return
        if is_there:
            silence.lost = await self._outlasts_its_node(agent, seconds, ask)
        else:
            silence.lost = seconds >= SILENT_SECONDS
        if silence.lost:
            what = "the agent does not answer" if is_there else "nothing answers"
            logger.info("%s at %s, the address of pod %s, which others miss", what, agent.host, agent.pod_uid)
            self._wake(agent.job_uid)

    async def _is_there(self, agent: Agent, ask: Ask) -> bool | None:
        """Whether at least connections are taken at an agent's address; None: it answers, or its kernel does."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await ask(agent, self._token_of(agent.job_uid), STATUS_PATH)
        except Unreachable:
            return False
        except TimeoutError:
            return True
        except Exception as error:
            logger.debug("the agent of pod %s at %s is there: %r", agent.pod_uid, agent.host, error)
        return None

    async def _outlasts_its_node(self, agent: Agent, seconds: float, ask: Ask) -> bool:
        """Whether an agent has been silent for so long that it cannot be its whole node which is stopped: another pod
        of that node answers, or Kubernetes would have called the node not ready."""
        if seconds >= UNSEEN_SECONDS:
            return True
        if seconds < UNANSWERED_SECONDS:
            return False
        others = await self._others_of_its_node(agent)
        return any(await asyncio.gather(*(self._answers(one, ask) for one in others)))

    async def _answers(self, agent: Agent, ask: Ask) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await ask(agent, self._token_of(agent.job_uid), STATUS_PATH)
        except Exception as error:
            logger.debug("the agent of pod %s at %s does not answer, either: %r", agent.pod_uid, agent.host, error)
            return False
        return True

    async def _others_of_its_node(self, silent: Agent) -> list[Agent]:
        """Agents of other pods of the same node, of any job: some of them."""
        found = list[Agent]()
        own = next((pod for pod in self._world.last_seen(silent.job_uid) if pod.uid == silent.pod_uid), None)
        if own is None or own.node is None:
            return []
        # Its own gang's come first: they are there, and the others may be many.
        for number, uid in enumerate(dict.fromkeys([silent.job_uid, *self._world.looked_at()])):
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
            pods = (pod for pod in self._world.last_seen(uid) if pod.node == own.node and pod.uid != own.uid)
            raws = (self._world.pods.get(pod.uid) for pod in pods if is_up(pod))
            found += [one for raw in raws if raw is not None and (one := agent_of(uid, raw, any_worker=True))]
            if len(found) >= _WITNESSES:
                break
        return found[:_WITNESSES]
