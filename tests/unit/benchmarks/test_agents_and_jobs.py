"""What the benchmarks of recovery and hangs read of jobs, and that the operator's code asks simulated agents."""

import asyncio
from pathlib import Path

from benchmarks.agent_scale import a_job, simulated
from benchmarks.local_agents import asking, world_of
from benchmarks.local_job import Log
from disttrain_operator.agents import Agents


def test_a_life_does_again_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    log = Log(tmp_path)
    path = tmp_path / "disttrain-runs" / "one" / "logs" / "worker-0-a1.log"
    path.parent.mkdir(parents=True)
    path.write_text("[rank 0] no checkpoint yet: step 0\n")
    log.read()
    assert (log.lives, log.trains, log.step, log.redone) == (1, False, 0, [])
    with path.open("a") as file:
        file.write("[rank 0] step: 10  loss: 1.0  \n[rank 0] step: 20  loss: 1.0  \n[rank 0] step: 3")
    log.read()
    assert (log.lives, log.trains, log.step) == (1, True, 20), "half a line is none yet"
    with path.open("a") as file:
        file.write("0  loss: 1.0  \n[rank 0] resuming after step 25 from /a/step-25\n")
    log.read()
    assert (log.lives, log.trains, log.resumed, log.redone) == (2, False, 25, [5])
    (path.parent / "worker-0-a2.log").write_text("[rank 0] no checkpoint yet: step 0\n[rank 0] step: 10  loss: 1.0  \n")
    log.read()
    assert (log.lives, log.trains, log.resumed, log.step, log.redone) == (3, True, 0, 10, [5, 30])


async def test_the_operators_code_takes_the_answers_of_the_simulated_agents() -> None:
    jobs = [a_job(number) for number in range(5)]
    woken: list[str] = []
    agents = Agents(world_of(jobs, 2), lambda uid: uid, woken.append, lambda: True, interval=1, per_second=1e6)
    with simulated() as port:
        for _ in range(2):
            async with asyncio.TaskGroup() as tasks:
                await agents.round(asking(lambda agent: port), tasks)
    assert agents.counts == {"agent_answers": 10, "agent_failures": 0, "agent_answers_dropped": 0}
    assert sorted(woken) == sorted([job["metadata"]["uid"] for job in jobs] * 2), "each answer has another step"
