"""Asking the agents of a gang whose first pod shows no sign that it gets on: what is a hang, and what is none."""

import json
from collections.abc import Callable

import pytest

from disttrain_api.report import AgentStatus, Idle, RankPhase, RankReport, RankStatus
from disttrain_operator.agent_client import Agent
from tests.builders import UID
from tests.unit.operator.agent_fleet import STACKS, Fleet, a_pod, refuses

WAITS = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
WRITES = WAITS.replace("c10d", "checkpoint/filesystem").replace("all_reduce", "write_data").replace(
    "/torch/distributed/b.py", "/torch/distributed/checkpoint/filesystem.py"
)  # fmt: skip


class Gang(Fleet):
    """A job of two pods with a rank each, which save a checkpoint; the first has shown no sign for 700 s."""

    def __init__(self, deadline: int | None = 60) -> None:
        policy = {} if deadline is None else {"progressDeadlineSeconds": deadline}
        super().__init__(a_pod(), a_pod(1, 1), workers={"replicas": 2, "processesPerPod": 1}, runPolicy=policy)
        self.idle: dict[int, Idle | None] = dict.fromkeys(
            range(2), Idle(phase=RankPhase.SAVING, seconds=700.0, longest_seconds=3.0)
        )
        self.answers = lambda agent: self.of(agent.index)
        self.stacks = lambda agent: json.dumps(
            {"stacks": {str(agent.index): WRITES if agent.index else WAITS}}
        ).encode()

    def of(self, index: int) -> bytes:
        report = RankReport(rank=index, step=40, total_steps=100, phase="Saving", loss=1.0)
        rank = RankStatus(rank=index, report=report, seconds_since_step=700.0, idle=self.idle[index])
        return AgentStatus(job_uid=UID, attempt=1, ranks=[rank]).model_dump_json(by_alias=True).encode()

    async def hangs(self) -> bool:
        live = await self.round()
        assert live is not None
        return live.stall is not None


async def test_a_gang_of_which_no_pod_gets_on_hangs_and_the_rank_that_writes_is_blamed() -> None:
    gang = Gang()
    gang.idle[1] = Idle(phase=RankPhase.SAVING, seconds=650.0, longest_seconds=3.0)
    live = await gang.round()
    assert live is not None
    assert live.stall is not None
    stall = live.stall
    assert (stall.rank, stall.seconds, stall.step, stall.phase) == (0, 650.0, 40, RankPhase.SAVING)
    assert stall.blame is not None
    assert (stall.blame.rank, stall.blame.awaited) == (1, True)
    assert stall.blame.why == "is in write_data (filesystem.py:3), and rank 0 waits in all_reduce (b.py:3)"


def the_other(idle: Idle | None) -> Callable[[Gang], None]:
    return lambda gang: gang.idle.update({1: idle})


def answers(answer: Callable[[Agent], bytes]) -> Callable[[Gang], None]:
    def change(gang: Gang) -> None:
        former = gang.answers
        gang.answers = lambda agent: answer(agent) if agent.index else former(agent)

    return change


@pytest.mark.parametrize(
    "change",
    [
        the_other(Idle(phase=RankPhase.SAVING, seconds=3.0, longest_seconds=3.0)),
        the_other(Idle(phase=RankPhase.SAVING, seconds=700.0)),
        the_other(Idle(phase=RankPhase.STARTING, seconds=700.0)),
        the_other(None),
        answers(refuses),
        answers(lambda agent: b"{}"),
        lambda gang: gang.world.pods.observe_deleted(a_pod(1, 1)),
        lambda gang: setattr(gang, "stacks", refuses),
    ],
    ids=[
        "the other one writes", "its first save", "it starts", "it does not say", "it does not answer",
        "its agent is another one", "it is gone", "nobody tells where they are",
    ],
)  # fmt: skip
async def test_a_gang_does_not_hang_where_another_pod_gets_on_or_does_not_say(change: Callable[[Gang], None]) -> None:
    gang = Gang()
    change(gang)
    assert not await gang.hangs()


async def test_without_a_deadline_no_other_pod_is_asked() -> None:
    gang = Gang(deadline=None)
    assert not await gang.hangs()
    assert {agent.index for agent, _ in gang.asked} == {0}


async def test_while_the_first_pod_gets_on_no_other_is_asked() -> None:
    gang = Gang()
    gang.idle[0] = Idle(phase=RankPhase.SAVING, seconds=500.0, longest_seconds=3.0)
    assert not await gang.hangs()
    assert {agent.index for agent, _ in gang.asked} == {0}
