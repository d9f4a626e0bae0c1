"""When a pod of a local run is silent: by what its agent and the others say."""

import pytest

from disttrain.local import silent
from disttrain.local.silent import LOOK_SECONDS, SilentAgents, Waiting, Worker
from disttrain_api.report import AgentStatus
from disttrain_operator.silent_pods import UNANSWERED_SECONDS

WORKERS = [Worker("a", 0, 1000), Worker("b", 1, 1001)]
Answers = dict[int, bytes | Exception]


def waits_for(*workers: int) -> bytes:
    return AgentStatus(job_uid="u", attempt=1, ranks=[], awaited=list(workers)).model_dump_json(by_alias=True).encode()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What comes of asking the agents at these ports."""
    found: Answers = {}

    async def exchange(method: str, host: str, port: int, *_: object, **__: object) -> bytes:
        answer = found[port]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(silent, "exchange", exchange)
    return found


class Agents:
    """The agents of a run, in a time of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self._agents = SilentAgents("token", lambda: self.now)

    async def looks(self, seconds: float, missed: frozenset[int] = frozenset()) -> Waiting:
        """What is known after so many seconds of looks."""
        end = self.now + seconds
        while True:
            found = await self._agents.look(WORKERS, missed)
            if self.now >= end:
                return found
            self.now += LOOK_SECONDS


async def test_a_pod_is_silent_for_whose_ranks_all_others_wait_in_a_step(answers: Answers) -> None:
    answers |= {1000: waits_for(), 1001: TimeoutError()}
    for missed, late in ((frozenset({1}), frozenset({"b"})), (frozenset(), frozenset())):
        agents = Agents()
        await agents.looks(0, missed)
        agents.now += UNANSWERED_SECONDS
        assert (await agents.looks(0, missed)).silent == late


async def test_a_pod_is_silent_that_others_wait_for_and_that_has_not_answered_for_half_a_minute(
    answers: Answers,
) -> None:
    agents = Agents()
    answers |= {1000: waits_for(1), 1001: TimeoutError()}
    assert await agents.looks(UNANSWERED_SECONDS - LOOK_SECONDS) == Waiting(frozenset({1}))
    assert await agents.looks(LOOK_SECONDS) == Waiting(frozenset({1}), frozenset({"b"}))
    answers[1001] = waits_for()
    assert await agents.looks(0) == Waiting(frozenset({1})), "it goes on"


async def test_the_pod_of_worker_0_is_silent_by_what_another_one_says(answers: Answers) -> None:
    answers |= {1000: TimeoutError(), 1001: waits_for(0)}
    assert await Agents().looks(UNANSWERED_SECONDS) == Waiting(frozenset({0}), frozenset({"a"}))


async def test_the_time_counts_from_when_others_wait_for_it(answers: Answers) -> None:
    """Red where it counts from the first question: an agent that goes on after 40 s keeps its pod."""
    agents = Agents()
    answers |= {1000: waits_for(), 1001: TimeoutError()}
    assert await agents.looks(10 * UNANSWERED_SECONDS) == Waiting()
    answers[1000] = waits_for(1)
    assert await agents.looks(UNANSWERED_SECONDS - LOOK_SECONDS) == Waiting(frozenset({1}))


@pytest.mark.parametrize("other", [ConnectionRefusedError(), OSError(), b"{}"], ids=repr)
async def test_what_answers_otherwise_is_not_silent(answers: Answers, other: bytes | Exception) -> None:
    answers |= {1000: waits_for(1), 1001: other}
    assert await Agents().looks(10 * UNANSWERED_SECONDS) == Waiting(frozenset({1}))


async def test_where_no_agent_answers_nobody_is_silent(answers: Answers) -> None:
    answers |= {1000: TimeoutError(), 1001: TimeoutError()}
    assert await Agents().looks(10 * UNANSWERED_SECONDS) == Waiting()
