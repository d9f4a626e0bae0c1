"""A job whose first worker's node is silent: whom the operator asks, and what it believes of the answer."""

import json

import aiohttp

from disttrain_operator.agents import Agent

from .test_agents import Fleet, a_pod, an_answer

SILENT = {"conditions": [{"type": "Ready", "status": "False"}]}


async def test_another_agent_says_whether_its_ranks_wait_for_a_first_worker_that_does_not_answer() -> None:
    first, second = a_pod(2), a_pod(2, 1, host="10.0.0.9")
    fleet, alive = Fleet(first, second, a_pod(1, host="10.0.0.8")), False

    def answer(agent: Agent) -> bytes:
        if agent.index == 0 and not alive:
            raise aiohttp.ClientError("nobody is there")
        return json.dumps(json.loads(an_answer(agent.attempt)) | {"awaited": [0, 1]}).encode()

    fleet.answers = answer
    assert await fleet.round() is None, "its node reports"
    fleet.world.pods.observe(a_pod(2, **SILENT) | {"metadata": first["metadata"] | {"resourceVersion": "6"}})
    for _ in range(2):
        live = await fleet.round()
        assert live is not None
        assert (live.pod_uid, live.awaited, live.report) == (second["metadata"]["uid"], {0}, None)
    alive = True
    live = await fleet.round()
    assert live is not None
    assert live.pod_uid == first["metadata"]["uid"], "only the operator had lost it"


async def test_nobody_is_asked_beside_it_where_all_nodes_are_silent_or_no_other_agent_answers() -> None:
    for of_second in (SILENT, {}):
        fleet = Fleet(a_pod(2, **SILENT), a_pod(2, 1, host="10.0.0.9", **of_second))

        def answer(agent: Agent) -> bytes:
            raise aiohttp.ClientError("nobody is there")

        fleet.answers = answer
        for _ in range(3):
            assert await fleet.round() is None
        assert [agent.index for agent, _ in fleet.asked] == ([0, 0] if of_second else [0, 1, 0, 1])
        assert fleet.agents.counts["agent_failures"] == 2
