"""Operators in memory, whose requests arrive when a test lets them. For the state machine of generations."""

import types
from collections import deque
from collections.abc import Coroutine, Generator
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from disttrain_api.names import AGENT_PORT
from disttrain_api.report import decode_agent_status
from disttrain_operator.agent_client import Agent, agent_of, live_of
from disttrain_operator.agent_http import NoAnswer
from disttrain_operator.decide.decision import RestartInPlace
from disttrain_operator.decide.hang import stall_of
from disttrain_operator.decide.live import Blame
from disttrain_operator.hang_orders import HangOrders
from disttrain_operator.reconcile import same_meaning
from tests.builders import UID, a_raw_pod
from tests.unit.decide.cluster import Operator, Server


@dataclass(eq=False)
class Order:
    """An order of an operator to an agent on its way, and what waits for the answer."""

    agent: Agent
    path: str
    waits: Coroutine[Any, Any, None]


@types.coroutine
def _answer_to(agent: Agent, path: str) -> Generator[tuple[Agent, str], bytes, bytes]:
    return (yield agent, path)


async def _ask(agent: Agent, token: str, path: str) -> bytes:
    return await _answer_to(agent, path)


class Replica(Operator):
    """One process of the operator. Its requests to the API server arrive when the test lets them."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        world: Any = SimpleNamespace(pods=self.pods, orders={}, wake=lambda uid: None)
        self._given, self._orders = world.orders, HangOrders(world, lambda uid: f"token of {uid}", _ask)
        self.sent: list[Order] = []
        self.requests: deque[Any] = deque()
        """To the API server, from its last decision: a status with the job that it was decided from, then actions."""
        self.answer: tuple[Agent, bytes] | None = None
        """An agent has sent it, and it is on its way."""

    def look(self) -> bool:
        """Decide; return whether anything follows from it."""
        self.order = self._given.get(UID)
        decision, job = self.decide(), self.facts()
        if decision.status is not None and not same_meaning(decision.status, job.status):
            self.requests.append((decision.status, job))
        self.requests.extend(decision.actions)
        return bool(self.requests)

    def arrives(self) -> None:
        """Its next request arrives. A status that is out of date is refused, and nothing after it is sent.

        A replica that leads has seen the pods that the one before has made (leadership.py), and one whose status is
        refused sees them before it decides again (reconcile.py).
        """
        request = self.requests.popleft()
        if not isinstance(request, tuple):
            self._act(request)
            return
        status, job = request
        written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if not self.server.write_status(written, job.resource_version):
            self.requests.clear()
            for raw in list(self.server.pods.values()):
                self.pods.observe(deepcopy(raw))
        self.read_job()

    def sees_all(self) -> None:
        """Its watches have told it all there is: that of pods is not behind that of jobs."""
        self.deliver(1000)
        self.read_job()

    def _act(self, action: Any) -> None:
        if not isinstance(action, RestartInPlace):
            super()._act(action)
            return
        waits = self._orders.give(UID, action)
        try:
            agent, path = waits.send(None)
        except StopIteration:
            return
        self.sent.append(Order(agent, path, waits))

    def _create(self, action: Any) -> None:
        uid = f"uid-{len(self.server.created) + 1}"
        raw = a_raw_pod(self.facts(), action.role, action.index, action.attempt, uid=uid)
        raw["spec"] |= {"agentPort": AGENT_PORT, "replacement": action.replacement}
        raw["status"]["podIP"] = f"10.0.0.{action.index + 1}"
        answer = self.server.create_pod(raw)
        assert answer is not None
        self.pods.observe(answer)

    def first_agent(self) -> Agent | None:
        """Whom it asks how the job is, as far as it knows."""
        found = [agent for raw in self.pods.group(UID) if (agent := agent_of(UID, raw)) is not None]
        return max(found, key=lambda agent: agent.attempt, default=None)

    def learns(self, agent: Agent, answer: bytes, blame: Blame) -> None:
        """An agent's answer has come."""
        status = decode_agent_status(answer)
        live = live_of(agent, status)
        if live is None or status is None:
            return
        stall = stall_of(status)
        if stall is not None and stall.seconds > 60:
            live = replace(live, stall=replace(stall, blame=blame))
        self.live = live


def answered(order: Order, found: bool | str | None) -> None:
    """What waits for the answer gets it; None: none comes."""
    try:
        if found is None:
            order.waits.throw(TimeoutError())
        elif isinstance(found, str):
            order.waits.throw(NoAnswer("it answers 409"))
        else:
            order.waits.send(b"{}")
    except StopIteration:
        return
