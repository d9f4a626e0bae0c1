"""Orders to worker 0's agent to restart the ranks of a gang that hangs in their pods."""

import logging
from collections.abc import Callable

from disttrain_api.bounds import cut
from disttrain_api.names import RESTART_PATH
from disttrain_operator.agent_client import Agent, Ask, agent_of
from disttrain_operator.decide.decision import Order, RestartInPlace
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

_MOST_WHY = 200


class HangOrders:
    """Gives orders, and keeps in `world` what came of them."""

    def __init__(self, world: World, token_of: Callable[[str], str], ask: Ask) -> None:
        """`token_of`: the token of a job's agents, by its uid."""
        self._world, self._token_of, self._ask = world, token_of, ask

    async def give(self, job_uid: str, order: RestartInPlace) -> None:
        """Give an order. It may come late or twice: an agent does nothing for ranks that have ended or got on."""
        pod = self._world.pods.get(order.pod_uid)
        agent = None if pod is None else agent_of(job_uid, pod)
        refused = "worker 0's pod is gone" if agent is None else await self._refused(agent, order)
        self._world.orders[job_uid] = Order(order, refused)
        # What has come of it is for another decision.
        self._world.wake(job_uid)

    async def _refused(self, agent: Agent, order: RestartInPlace) -> str | None:
        """Why the agent does not follow the order; None: it does."""
        rank = "" if order.rank is None else order.rank
        query = f"attempt={order.attempt}&generation={order.generation}&step={order.step}&rank={rank}"
        try:
            await self._ask(agent, self._token_of(agent.job_uid), f"{RESTART_PATH}?{query}")
        except Exception as error:
            logger.info("the agent of pod %s at %s follows no order to restart: %r", agent.pod_uid, agent.host, error)
            return cut(f"worker 0's agent: {str(error) or type(error).__name__}", _MOST_WHY)
        return None
