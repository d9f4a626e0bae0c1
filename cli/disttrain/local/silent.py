"""Which pods of a local run are stopped while others wait for them: their agents are asked.

An operator asks the agents of a cluster for more than that, and judges by the same time (silent_pods.py). Here the
agent that answers runs on the same machine as the one that does not: so it is not the machine that is slow.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from disttrain_api.agent_api import STATUS
from disttrain_api.names import TOKEN_HEADER
from disttrain_api.report import MAX_AGENT_ANSWER_BYTES, AgentStatus, decode_agent_status
from disttrain_operator.agent_http import exchange
from disttrain_operator.silent_pods import UNANSWERED_SECONDS

LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 2.5


class Worker(NamedTuple):
    """A worker's pod that runs."""

    pod_uid: str
    index: int
    port: int
    """Its agent's, on the loopback interface."""


class Waiting(NamedTuple):
    """What the agents of an attempt say."""

    awaited: frozenset[int] = frozenset()
    """Workers whose pods others have lost, and wait for."""
    silent: frozenset[str] = frozenset()
    """Uids of those of these pods whose agents have not answered for a while."""


class SilentAgents:
    """Asks the agents of a run."""

    def __init__(self, token: str, clock: Callable[[], float]) -> None:
        """`token`: that of the agents. clock: in seconds."""
        self._token, self._clock = token, clock
        self._since: dict[str, float] = {}
        """When each pod was asked first that is awaited and has not answered since."""

    async def look(self, workers: list[Worker], missed: frozenset[int] = frozenset()) -> Waiting:
        """Ask the agents of these pods once, all at the same time. missed: workers for whose ranks all others wait in a
        step."""
        began = self._clock()
        answers = dict(zip(workers, await asyncio.gather(*map(self._ask, workers)), strict=True))
        return self._waiting(answers, missed, began)

    def _waiting(
        self, answers: Mapping[Worker, AgentStatus | TimeoutError | None], missed: frozenset[int], began: float
    ) -> Waiting:
        heard = [answer for answer in answers.values() if isinstance(answer, AgentStatus)]
        awaited = frozenset(index for answer in heard for index in answer.awaited)
        late = [one for one, answer in answers.items() if isinstance(answer, TimeoutError)]
        silent = [one for one in late if one.index in awaited | missed]
        self._since = {one.pod_uid: self._since.get(one.pod_uid, began) for one in silent}
        now = self._clock()
        return Waiting(awaited, frozenset(uid for uid, at in self._since.items() if now - at >= UNANSWERED_SECONDS))

    async def _ask(self, worker: Worker) -> AgentStatus | TimeoutError | None:
        """What an agent answers; None: it is there, or gone, and does not say anything."""
        try:
            return decode_agent_status(
                await exchange(
                    "GET", "127.0.0.1", worker.port, STATUS.path, {TOKEN_HEADER: self._token},
                    most=MAX_AGENT_ANSWER_BYTES, seconds=_ANSWER_SECONDS, connect_seconds=_ANSWER_SECONDS,
                )
            )  # fmt: skip
        except TimeoutError as error:
            return error
        except Exception:
            # Whatever else it is, its process runs or has ended, and its keeper says so.
            return None
