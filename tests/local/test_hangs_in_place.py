"""Real ranks that hang start again in their pods by the operator's order, and no step differs.

They go on from the memory of the rank that waits for the one that hangs; where all are killed, from the checkpoint.
"""

import asyncio
import json
import re
from collections.abc import Sequence, Set

import pytest

from disttrain.local.folder import AGENTS_FILE
from disttrain_api.agent_token import agent_token
from disttrain_api.names import RESTART_PATH, TOKEN_FILE
from disttrain_api.report import decode_agent_status
from disttrain_operator.agent_client import STATUS_PATH, Agent, ask_directly

from .conftest import Run, Workplace
from .test_restarts_in_place import (
    INTERVAL,
    ends_as_undisturbed,
    is_held,
    is_next_life,
    job,
    ranks_of,
)


def ordered(run: Run, rank: int | None) -> bool:
    """Give the order as the operator does, for the step that it knows of; return whether it is followed."""
    config = run.home / "config"
    agent = Agent("", "", 1, "127.0.0.1", json.loads((config / AGENTS_FILE).read_text())[0])
    token = agent_token((config / TOKEN_FILE).read_text())
    status = decode_agent_status(asyncio.run(ask_directly(agent, token, STATUS_PATH)))
    assert status is not None
    report, killed = status.ranks[0].report, "" if rank is None else rank
    path = f"{RESTART_PATH}?attempt=1&generation=0&step={report.step if report is not None else 0}&rank={killed}"
    return bool(json.loads(asyncio.run(ask_directly(agent, token, path)))["restarts"])


@pytest.mark.parametrize(
    ("rank", "survivors"),
    [(1, [{0}]), (0, [{1}]), (None, None)],
    ids=["the other worker's", "worker 0's", "all wait for each other"],
)
def test_ranks_that_hang_go_on_in_their_pods_as_if_nothing_had_happened(
    workplace: Workplace, rank: int | None, survivors: Sequence[Set[int]] | None
) -> None:
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released, pods=2))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    former = ranks_of(run)
    agents = [one.ppid() for one in former]
    stopped = former if rank is None else [former[rank]]
    for one in stopped:
        one.suspend()
    run.until(lambda: ordered(run, rank), "the order is followed")
    run.until(lambda: is_next_life(run, former, agents), "both ranks have started again below the same agents")
    assert not ordered(run, rank), "a late order does nothing"
    _, attempt = ends_as_undisturbed(workplace, run, released, pods=2, survivors=survivors)
    assert attempt["lastRestartInPlace"].startswith(f"rank {rank or 0} (pod ")
    assert "was killed by its agent, since no rank did a step" in attempt["lastRestartInPlace"]
    log = run.log(0, attempt=1)
    if survivors is None:
        assert re.search(r"the state of no surviving rank is used: no rank has left its state\n", log), log
        assert f"resuming after step {2 * INTERVAL} " in log
    assert not run.left()
