"""An order to restart in place goes to worker 0's agent once, and what came of it is a fact for the next decision."""

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from disttrain_operator.agent_client import Agent
from disttrain_operator.agent_http import NoAnswer
from disttrain_operator.decide.decision import Order, RestartInPlace
from disttrain_operator.execute import Executor
from disttrain_operator.hang_orders import HangOrders
from disttrain_operator.plan.site import Site
from tests.builders import UID, a_job
from tests.unit.operator.agent_fleet import Fleet, a_pod

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Ordered(Fleet):
    """A job of two pods whose agents are given orders by the executor."""

    def __init__(self, refuses: Exception | None = None) -> None:
        super().__init__(a_pod(), a_pod(1, 1))
        self.refuses, self.given = refuses, []
        self.uid = a_pod()["metadata"]["uid"]
        orders = HangOrders(self.world, lambda uid: f"token of {uid}", self.take)
        self.executor = Executor(
            Mock(max_in_flight=1), self.world, lambda job: Site(trainer_image="x", token=""), orders.give
        )

    async def take(self, agent: Agent, token: str, path: str) -> bytes:
        self.given.append((agent.index, token, path))
        if self.refuses is not None:
            raise self.refuses
        return b'{"restarts": true}'

    async def order(self, **changes: Any) -> Order | None:
        facts = {"pod_uid": self.uid, "attempt": 1, "generation": 2, "step": 40, "rank": 3, "at": NOW}
        action = RestartInPlace(**facts | changes)
        await self.executor.execute(a_job(), [action])
        found = self.world.orders.get(UID)
        assert found is None or found.given == action
        return found


@pytest.mark.parametrize(("rank", "text"), [(3, "3"), (None, "")])
async def test_the_first_workers_agent_is_asked_with_the_jobs_token(rank: int | None, text: str) -> None:
    fleet = Ordered()
    order = await fleet.order(rank=rank)
    assert order is not None
    assert order.refused is None
    path = f"/v1/restart?attempt=1&generation=2&step=40&rank={text}"
    assert fleet.given == [(0, f"token of {UID}", path)]


@pytest.mark.parametrize("error", [NoAnswer("it answers 409"), TimeoutError(), OSError("x" * 10_000)], ids=type)
async def test_whatever_keeps_the_answer_away_is_a_refusal(error: Exception) -> None:
    order = await Ordered(error).order()
    assert order is not None
    assert order.refused is not None
    assert order.refused.startswith(f"worker 0's agent: {str(error)[:20] or 'TimeoutError'}")
    assert len(order.refused) < 300


async def test_a_pod_that_is_gone_is_not_asked() -> None:
    fleet = Ordered()
    order = await fleet.order(pod_uid="of another life")
    assert order is not None
    assert (order.refused, fleet.given) == ("worker 0's pod is gone", [])


async def test_the_next_decision_knows_the_order_and_a_job_that_is_gone_leaves_none() -> None:
    fleet = Ordered()
    await fleet.order()
    snapshot = fleet.world.snapshot(UID)
    assert snapshot is not None
    assert snapshot[1].order == fleet.world.orders[UID] is not None
    fleet.executor.forget(UID)
    assert fleet.world.orders == {}
