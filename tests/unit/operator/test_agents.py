"""Asking the agents of jobs that run: what is believed of an answer, and what an agent that does not answer costs."""

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest

from disttrain_api.flight_recorder import Collective
from disttrain_api.names import AGENT_PORT, CHECKPOINT_REQUEST, CONTAINER
from disttrain_api.report import MAX_AGENT_ANSWER_BYTES
from disttrain_api.stacks import with_collectives
from disttrain_operator.agent_client import Agent, agent_of
from disttrain_operator.agents import TOGETHER_SECONDS, Agents, Turns
from disttrain_operator.decide.live import Blame
from disttrain_operator.kept_pod import keep_pod
from tests.builders import UID, a_raw_job
from tests.unit.operator.agent_fleet import STACKS, Fleet, Raw, a_pod, a_silent_answer, an_answer, refuses
from tests.unit.operator.conftest import eventually


async def test_the_first_worker_of_the_newest_attempt_is_asked_and_wakes_its_job_with_what_is_new() -> None:
    fleet = Fleet(a_pod(1), a_pod(2), a_pod(2, 1), a_pod(3, phase="Pending"))
    fleet.answers = lambda agent: an_answer(2)
    live = await fleet.round()
    assert (live.attempt, live.report.step, fleet.woken) == (2, 5, [UID])
    assert [(agent.attempt, agent.host, agent.port, token) for agent, token in fleet.asked] == [
        (2, "10.0.0.7", AGENT_PORT, f"token of {UID}")
    ]
    await fleet.round()
    assert fleet.woken == [UID], "nothing new: nobody is woken"
    fleet.answers = lambda agent: an_answer(2, step=6)
    await fleet.round()
    assert fleet.woken == [UID, UID]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        an_answer(attempt=2),
        an_answer(uid="another"),
        b'{"jobUid": "' + UID.encode() + b'", "attempt": 1, "ranks": [' + b'{"rank": 0},' * 300 + b'{"rank": 1}]}',
        an_answer() + b" " * MAX_AGENT_ANSWER_BYTES,
    ],
)
async def test_what_is_no_answer_of_this_attempt_is_dropped_and_counted(answer: bytes) -> None:
    """Red without the comparison of the job's uid, that of the attempt, and the bound on an answer's bytes."""
    fleet = Fleet(a_pod())
    fleet.answers = lambda agent: answer
    assert await fleet.round() is None
    assert (fleet.woken, fleet.agents.counts["agent_answers_dropped"]) == ([], 1)


async def test_each_new_request_for_a_checkpoint_reaches_an_agent_once() -> None:
    """Red without: the comparison with the last request, the next try after a refusal, the next attempt's request."""
    fleet, taken = Fleet(a_pod()), list[int]()

    def job(version: int, request: str) -> None:
        metadata = {"resourceVersion": str(version), "annotations": {CHECKPOINT_REQUEST: request}}
        fleet.world.jobs.observe(a_raw_job() | {"metadata": a_raw_job()["metadata"] | metadata})

    def take(agent: Agent) -> bytes:
        taken.append(agent.attempt)
        return b"{}"

    def refuse(agent: Agent) -> bytes:
        raise aiohttp.ClientError("it answers 409")

    await fleet.round()
    fleet.checkpoints = refuse
    job(5, "first")
    await fleet.round()
    fleet.checkpoints = take
    for _ in range(3):
        await fleet.round()
    assert taken == [1]
    fleet.world.pods.observe(a_pod(1, phase="Failed"))
    await fleet.round()
    fleet.world.pods.observe(a_pod(2))
    fleet.answers = lambda agent: an_answer(2)
    await fleet.round()
    for _ in range(2):
        live = await fleet.round()
    assert taken == [1, 2], "no checkpoint has come since: the next attempt is asked, too"
    assert live.taken_request == "first"
    job(6, "second")
    live = await fleet.round()
    assert taken == [1, 2, 2]
    assert live.taken_request == "second"


async def test_ranks_that_start_again_are_asked_for_what_they_had_not_written_and_for_nothing_else() -> None:
    """Red without: the restarts in place, the comparison of the checkpoint."""
    fleet, taken = Fleet(a_pod()), list[Agent]()
    fleet.checkpoints = lambda agent: taken.append(agent) or b"{}"  # type: ignore[func-returns-value]

    def job(version: int, step: int) -> None:
        raw = a_raw_job(status={"checkpoint": {"step": step, "path": f"/c/{step}", "time": "2026-11-01T00:00:00Z"}})
        metadata = {"resourceVersion": str(version), "annotations": {CHECKPOINT_REQUEST: "once"}}
        fleet.world.jobs.observe(raw | {"metadata": raw["metadata"] | metadata})

    def restarted(count: int) -> Callable[[Agent], bytes]:
        restarts = {"count": count, "time": "2026-11-01T00:00:00Z", "failure": {"rank": 0}}
        return lambda agent: json.dumps(json.loads(an_answer()) | {"restartsInPlace": restarts}).encode()

    job(5, 10)
    await fleet.round()
    fleet.answers = restarted(1)
    await fleet.round()
    await fleet.round()
    assert len(taken) == 2
    job(6, 20)
    fleet.answers = restarted(2)
    await fleet.round()
    assert len(taken) == 2, "a checkpoint has come since"


async def test_figures_that_no_status_can_hold_are_left_out() -> None:
    fleet = Fleet(a_pod())
    fleet.answers = lambda agent: an_answer(loss="1e999", remainingSeconds=-1, samplesPerSecond="x" * 100, phase=7)
    live = await fleet.round()
    assert live.report is not None
    report = live.report
    assert (report.step, report.loss, report.remaining_seconds, report.phase) == (5, None, None, None)


async def test_an_agent_that_does_not_answer_is_asked_less_and_less_often_until_it_does() -> None:
    fleet = Fleet(a_pod())

    def away(agent: Agent) -> bytes:
        raise TimeoutError

    fleet.answers = away
    for _ in range(64):
        await fleet.round()
    assert 5 <= len(fleet.asked) <= 8
    fleet.answers = lambda agent: an_answer()
    for _ in range(33):
        await fleet.round()
    assert fleet.agents.live(UID) is not None
    before = len(fleet.asked)
    await fleet.round()
    assert len(fleet.asked) == before + 1


async def test_of_a_job_whose_pod_has_ended_nothing_is_remembered() -> None:
    pod = a_pod()
    fleet = Fleet(pod)
    assert await fleet.round() is not None
    ended = a_pod(phase="Failed")
    ended["metadata"]["resourceVersion"] = "9"
    fleet.world.pods.observe(ended)
    assert await fleet.round() is None


async def test_ranks_that_do_no_step_for_too_long_are_asked_where_they_are() -> None:
    fleet = Fleet(a_pod(), runPolicy={"progressDeadlineSeconds": 100})
    fleet.answers = lambda agent: a_silent_answer(99)
    live = await fleet.round()
    assert live.stall is None
    fleet.answers = lambda agent: a_silent_answer(101)
    live = await fleet.round()
    assert (live.stall.seconds, live.stall.stack, len(fleet.woken)) == (101, "all_reduce (b.py:3)", 2)


async def test_the_stacks_of_all_pods_tell_which_rank_holds_up_the_others() -> None:
    third = a_pod(2, 1)
    third["metadata"] |= {"uid": "third", "name": "third"}
    third["metadata"]["labels"]["disttrain.io/index"] = "2"
    fleet = Fleet(a_pod(2), a_pod(2, 1), third, a_pod(1, 1), runPolicy={"progressDeadlineSeconds": 100})
    waits = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
    asked = []

    def stacks(agent: Agent) -> bytes:
        asked.append(agent.index)
        if agent.index == 2:
            raise TimeoutError
        # Rank 0 is not its own: what it says of that counts for nothing.
        own = {"0": waits} if agent.index == 0 else {"0": "no", "1": "it does not answer"}
        return json.dumps({"stacks": own}).encode()

    answer = a_silent_answer(101).replace(b'"attempt": 1', b'"attempt": 2')
    fleet.answers, fleet.stacks = lambda agent: answer, stacks
    live = await fleet.round()
    assert sorted(asked) == [0, 1, 2]
    assert live.stall.blame == Blame(1, "does not answer, and rank 0 waits in all_reduce (b.py:3)", awaited=True)


async def test_a_hang_says_where_the_ranks_are_in_the_collective_calls_of_their_groups() -> None:
    fleet = Fleet(a_pod(2), a_pod(2, 1), runPolicy={"progressDeadlineSeconds": 100})
    waits = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")

    def stacks(agent: Agent) -> bytes:
        call = Collective("0", "", 4 - agent.index, "gloo:all_reduce", "8", pending=agent.index == 0)
        return json.dumps({"stacks": {str(agent.index): with_collectives(waits, [call])}}).encode()

    answer = a_silent_answer(101).replace(b'"attempt": 1', b'"attempt": 2')
    fleet.answers, fleet.stacks = lambda agent: answer, stacks
    live = await fleet.round()
    assert live.stall.recorded == (
        "by torch's flight recorder in group 0 rank 0 waits in call 4: gloo:all_reduce of 8, rank 1 has done call 3:"
        " gloo:all_reduce of 8"
    )
    assert live.stall.blame.rank == 1
    assert live.stall.blame.why.startswith(
        "has not begun call 4: gloo:all_reduce of 8 in group 0, and rank 0 waits in it"
    )


@pytest.mark.parametrize("stacks", [refuses, lambda agent: b"{}", lambda agent: b'{"stacks": {"1": "x"}}'])
async def test_without_stacks_it_is_asked_again_and_nothing_is_reported(stacks: Callable[[Agent], bytes]) -> None:
    fleet = Fleet(a_pod(), runPolicy={"progressDeadlineSeconds": 100})
    fleet.answers, fleet.stacks = lambda agent: a_silent_answer(500), stacks
    live = await fleet.round()
    assert (live.stall, live.report is not None) == (None, True)
    fleet.stacks = lambda agent: STACKS
    live = await fleet.round()
    assert live.stall is not None


@pytest.mark.parametrize("progress", [None, {"totalSteps": 9, "logRules": [{"pattern": "step (?P<step>[0-9]+)"}]}])
async def test_a_program_that_says_no_phase_is_asked_for_no_stacks(progress: Raw | None) -> None:
    workers = {"image": "mine:1", "command": ["train"]}
    limit = {"progressDeadlineSeconds": 100}
    fleet = Fleet(a_pod(), training=None, workers=workers, progress=progress, runPolicy=limit)
    fleet.answers, fleet.stacks = lambda agent: a_silent_answer(101, None), refuses
    live = await fleet.round()
    assert live is not None
    assert live.stall is not None
    assert (live.stall.seconds, live.stall.stack) == (101, "")


async def test_a_job_without_a_limit_is_asked_for_no_stacks() -> None:
    fleet = Fleet(a_pod())
    fleet.answers, fleet.stacks = lambda agent: a_silent_answer(10**6), refuses
    live = await fleet.round()
    assert live.stall is None


@pytest.mark.parametrize(
    "pod",
    [
        a_pod(host="127.0.0.1"),
        a_pod(host="169.254.169.254"),
        a_pod(host="::1"),
        a_pod(host="fe80::1%eth0"),
        a_pod(host="fd00::1%eth0"),
        a_pod(host="::ffff:127.0.0.1"),
        a_pod(host="0.0.0.0"),
        a_pod(host="224.0.0.1"),
        a_pod(host="example.org/x?"),
        a_pod(host=""),
        a_pod(port=443),
        a_pod(port=""),
        a_pod(port="29700 "),
        a_pod(port=10**9),
        a_pod(index=1),
        a_pod(phase="Succeeded"),
        a_pod(containerStatuses=[{"name": CONTAINER, "state": {"terminated": {"exitCode": 0}}}]),
    ],
    ids=lambda pod: (
        f"{pod['status']['podIP']} {pod['spec']['containers'][0]['env'][0]['value']} {pod['status']['phase']}"
    ),
)
def test_no_address_is_asked_that_cannot_be_an_agents(pod: Raw) -> None:
    """Red without any one of the looks at an address, a port, an index or a phase."""
    assert agent_of(UID, keep_pod(pod)) is None


@pytest.mark.parametrize("attempt", ["²", "٣", "1²", "-1", "", "1" * 10, "x"])
def test_an_attempt_that_is_no_number_of_the_operators_has_no_agent(attempt: str) -> None:
    pod = a_pod()
    pod["metadata"]["labels"]["disttrain.io/attempt"] = attempt
    assert agent_of(UID, keep_pod(pod)) is None


def test_an_address_of_version_6_is_asked_in_brackets() -> None:
    found = agent_of(UID, keep_pod(keep_pod(a_pod(host="fd00::7"))))
    assert found.host == "[fd00::7]"


def test_requests_come_at_their_rate_whatever_each_takes() -> None:
    """Red where a pause follows the work of a request: there were 43 a second instead of 50. Those of 50 ms come
    together."""
    turns, now, begun = Turns(50.0), 0.0, list[float]()
    for work in (0.0, 0.015, 0.005, 0.019, 0.0, 0.001, 0.0, 0.0, 0.0):
        begun.append(round(now, 3))
        now += work
        now += turns.wait(now)
    assert begun == [0.0, 0.0, 0.015, 0.02, 0.039, 0.1, 0.101, 0.101, 0.16]
    assert all(count <= 50.0 * (at + TOGETHER_SECONDS) + 1 for count, at in enumerate(begun, start=1))


def test_many_requests_a_second_are_no_more_than_that() -> None:
    turns, now = Turns(1000.0), 0.0
    for _ in range(2000):
        now += turns.wait(now)
    assert now == pytest.approx(2.0, abs=2 * TOGETHER_SECONDS)


def test_of_a_break_a_quarter_of_a_second_is_made_up_for_and_no_more() -> None:
    turns = Turns(10.0)
    assert [round(turns.wait(60.0), 3) for _ in range(6)] == [0.0, 0.0, 0.0, 0.05, 0.15, 0.25]


def test_requests_come_at_their_rate_where_each_wait_takes_longer_than_it_should() -> None:
    """Red where what a busy machine takes away is lost: there were 75 a second instead of 100."""
    turns, now = Turns(100.0), 0.0
    for _ in range(1000):
        seconds = turns.wait(now)
        now += seconds + 0.02 if seconds else 0.0
    assert now == pytest.approx(10.0, abs=0.1)


async def test_rounds_go_on_whatever_an_agent_does() -> None:
    """Red where an error that nobody has thought of leaves the round."""
    fleet = Fleet(a_pod())
    asked = asyncio.Event()

    async def breaks(agent: Agent, token: str, path: str) -> bytes:
        asked.set()
        raise RuntimeError("nobody has thought of it")

    agents = Agents(fleet.world, str, fleet.woken.append, lambda: True, interval=0.001, per_second=1e6, ask=breaks)
    task = asyncio.create_task(agents.run())
    await eventually(lambda: task.done() or agents.counts["agent_failures"] > 2)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
