"""A job whose first worker's node is silent: whom the operator asks, and what it believes of the answer."""

import json

import aiohttp

from disttrain_operator.agents import Agent

from .test_agents import Fleet, a_pod, an_answer

SILENT = {"conditions": [{"type": "Ready", "status": "False"}]}


async def test_where_the_first_workers_node_is_silent_another_agent_says_whether_its_ranks_wait_for_it() -> None:
    """Red where an agent that does not answer has the next one skipped, and where its figures count as the job's."""
    first, second = a_pod(2), a_pod(2, 1, host="10.0.0.9")
    fleet = Fleet(first, second, a_pod(1, host="10.0.0.8"))

    def answer(agent: Agent) -> bytes:
        if agent.index == 0:
            raise aiohttp.ClientError("nobody is there")
        return json.dumps(json.loads(an_answer(agent.attempt)) | {"awaited": [0, 1]}).encode()

    fleet.answers = answer
    for _ in range(4):
        assert await fleet.round() is None
    fleet.world.pods.observe(a_pod(2, **SILENT) | {"metadata": first["metadata"] | {"resourceVersion": "6"}})
    live = await fleet.round()
    assert live is not None
    assert (live.pod_uid, live.awaited, live.report) == (second["metadata"]["uid"], {0}, None)
