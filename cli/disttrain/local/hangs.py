"""Which rank of a local run hangs, and which pods the others miss: the operator's own questions to the agents.

The operator's code knows a cluster. So the pods stand in its cache as they would there, at an address that nobody has,
and each question goes to the port of the pod's agent on this machine.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from disttrain_api.names import AGENT_PORT, CONTAINER, Env
from disttrain_operator.agent_client import Agent, ask_directly
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.agents import Agents
from disttrain_operator.decide.decision import Order, RestartInPlace
from disttrain_operator.decide.live import Live
from disttrain_operator.hang_orders import HangOrders
from disttrain_operator.kube.cache import Raw
from disttrain_operator.snapshot import World

_INTERVAL_SECONDS, _PER_SECOND = 10.0, 100.0
"""As an operator asks with its defaults."""
_NOWHERE = "192.0.2.1"
"""An address of those for documentation."""


class HangWatch:
    """Asks the agents of a run, and keeps the last answer.

    token: that of the agents. wake: have the job looked at.
    """

    def __init__(self, token: str, wake: Callable[[], None]) -> None:
        self._world, self._version = World(), 0
        self._ports: dict[str, int] = {}
        """Ports of agents, by their pods."""
        self._agents = Agents(
            self._world, lambda _: token, lambda _: wake(), lambda: True,
            interval=_INTERVAL_SECONDS, per_second=_PER_SECOND, ask=self._ask,
        )  # fmt: skip
        self._orders = HangOrders(self._world, lambda _: token, self._ask)

    async def run(self) -> None:
        """Ask, round after round, until cancelled."""
        await self._agents.run()

    def see(self, job: Raw, pods: Iterable[Raw]) -> None:
        """Take in a raw job as it is now, and its raw pods that exist."""
        self._world.jobs.observe(self._newest(job))
        there = {raw["metadata"]["uid"]: raw for raw in pods}
        self._ports = {uid: port for uid, raw in there.items() if (port := _agent_port(raw)) is not None}
        for raw in there.values():
            self._world.pods.observe(self._newest(_as_in_a_cluster(raw)))
        for raw in self._world.pods.objects():
            if raw["metadata"]["uid"] not in there:
                self._world.pods.observe_deleted(self._newest(raw))

    def heard(self, job_uid: str, live: Live | None, awaited: frozenset[int]) -> Live | None:
        """Return what the first worker says of itself, with what is known of its gang; awaited: as of Live."""
        if live is None:
            return None
        known = self._agents.live(job_uid)
        if known is None or (known.attempt, known.generation) != (live.attempt, live.generation):
            return replace(live, awaited=awaited)
        return replace(
            live, stall=known.stall, suspicion=known.suspicion, missing=known.missing, silent=known.silent,
            awaited=awaited | known.awaited,
        )  # fmt: skip

    def order(self, job_uid: str) -> Order | None:
        """Return the last order to restart in place."""
        return self._world.orders.get(job_uid)

    async def give(self, job_uid: str, order: RestartInPlace) -> None:
        """Have worker 0's agent restart all ranks in their pods."""
        await self._orders.give(job_uid, order)

    def _newest(self, raw: Raw) -> Raw:
        self._version += 1
        return {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self._version)}}

    async def _ask(self, agent: Agent, token: str, path: str) -> bytes:
        if (port := self._ports.get(agent.pod_uid)) is None:
            raise ConnectionRefusedError("its pod has ended")
        try:
            return await ask_directly(replace(agent, host="127.0.0.1", port=port), token, path)
        except Unreachable as error:
            # The kernel is this one: an agent that is stopped has too many connections that it has not taken.
            raise TimeoutError from error


def _agent_port(pod: Raw) -> int | None:
    """Return the port of the agent of a raw pod that runs; None where it has none."""
    env: list[dict[str, Any]] = pod["spec"]["containers"][0].get("env") or []
    text = next((entry.get("value") for entry in env if entry["name"] == Env.AGENT_PORT), None)
    return int(text) if text is not None and pod["status"].get("phase") == "Running" else None


def _as_in_a_cluster(pod: Raw) -> Raw:
    """Return a pod of this machine with the address and port that the agent of a pod has."""
    agent = [{"name": Env.AGENT_PORT, "value": str(AGENT_PORT)}] if _agent_port(pod) is not None else []
    spec = {"containers": [{"name": CONTAINER, "env": agent}]}
    return {**pod, "spec": spec, "status": {**pod["status"], "podIP": _NOWHERE}}
