"""A gang that hangs is killed once by an order to worker 0's agent, and starts again: decisions, and real processes."""

import json
from collections.abc import Callable

import pytest

from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import Kind, Message
from disttrain_agent.restart import Kept
from disttrain_api.names import RESTART_PATH, Env, ExitCode

from .conftest import Pod
from .test_gang_decisions import WINDOW, a_leader, all_end, exited, killed, orders
from .test_http_api import JOB_TOKEN, TOKEN, a_port, ask
from .test_restarts_in_place import FINISH, LIVES, in_place, restarts

PEER_LOST = ExitCode.PEER_LOST


@pytest.mark.parametrize("rank", [1, None])
def test_an_order_kills_once_and_all_stop_and_start_again(rank: int | None) -> None:
    leader = a_leader()
    assert leader.hangs(0, rank, Kept(), 100.0) is True
    (order,) = leader.orders
    assert (order.kind, order.generation, order.rank, leader.kill) == (Kind.KILL, 0, rank, order)
    leader.orders.clear()
    assert leader.hangs(0, rank, Kept(), 100.5) is False, "it is followed already"
    assert (orders(leader), leader.due) == ([], 100.0 + WINDOW)
    leader.tick(100.0 + WINDOW)
    assert orders(leader) == [(Kind.STOP, 0)], "also where nobody has said that its rank is dead"
    all_end(leader, exited(PEER_LOST, 0), killed(1), exited(PEER_LOST, 2), now=102.0)
    leader.tick(102.0)
    assert (orders(leader), leader.kill) == ([(Kind.START, 1)], None)
    assert leader.restart is not None
    assert (leader.restart.count, leader.restart.cause.rank) == (1, 1)
    assert leader.hangs(0, rank, Kept(), 200.0) is False, "the order comes late"
    assert (orders(leader), leader.due) == ([], None)


def test_nothing_is_killed_where_no_rank_could_start_again() -> None:
    leader = a_leader(restarts=1, backoff=0)
    leader.lost(2)
    assert leader.hangs(0, 1, Kept(), 0.0) == "the agent of worker 2 is not connected"
    assert leader.joins(2, 0, 1.0)
    all_end(leader, killed(0), killed(1), killed(2))
    leader.tick(1.0)
    assert orders(leader) == [(Kind.START, 1)]
    assert leader.hangs(1, 1, Kept(), 2.0) == "1 restarts in place without a new checkpoint are used up"
    assert (orders(leader), leader.due) == ([], None)
    assert leader.hangs(1, 1, Kept(10), 2.0) is True, "a checkpoint renews them"
    leader.leave("a pod has failed for good")
    assert leader.hangs(1, 1, Kept(20), 3.0) == "a pod has failed for good"


def test_another_pod_follows_an_order_of_its_own_generation_alone() -> None:
    member = Member()
    member.connected()
    order = Message(kind=Kind.KILL, generation=0, rank=1)
    member.receive(order)
    assert member.kill == order
    member.ended(killed())
    member.receive(Message(kind=Kind.START, generation=1))
    assert member.kill is None
    member.receive(order)
    assert member.kill is None


HANGS = (
    LIVES
    + """
report(step=4, totalSteps=9, phase="Training")
if number == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else signal.pause()
"""
)


@pytest.fixture
def hangs(pods: Callable[..., Pod]) -> Callable[..., Pod]:
    """Starts a pod whose first ranks do nothing after step 4, of which rank 1 is stopped."""

    def start(what: str = "", **changes: str) -> Pod:
        facts = {Env.AGENT_PORT: str(a_port()), Env.JOB_UID: "uid-1", Env.ATTEMPT: "3"}
        pod = in_place(pods, **facts, **changes)
        (pod.folder / "token").write_text(JOB_TOKEN)
        return pod.start(HANGS + what).until_ready()

    return start


def order(pod: Pod, token: str = TOKEN, **changes: object) -> tuple[int, object]:
    query = {"attempt": 3, "generation": 0, "step": 4, "rank": 1} | changes
    path = f"{RESTART_PATH}?{'&'.join(f'{name}={value}' for name, value in query.items())}"
    return ask(pod, path, token, method="POST")


HELD = """
ready()
while not (folder / "on").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("rank", [1, ""], ids=["one rank", "all"])
def test_ranks_that_hang_start_again_in_their_pod_by_an_order_and_a_late_one_does_nothing(
    hangs: Callable[..., Pod], rank: object
) -> None:
    pod = hangs(HELD + FINISH)
    assert order(pod, rank=rank) == (200, {"restarts": True})
    pod.until(lambda: len(list(pod.folder.glob("life-2.*"))) == 2, "both ranks start again")
    pod.until(lambda: not any(one["exitCode"] for one in without_reports(pod)), "they are the pod's ranks")
    assert order(pod, rank=rank) == (200, {"restarts": False})
    (pod.folder / "on").touch()
    assert pod.wait() == 0, pod.log
    assert len(list(pod.folder.glob("life-*"))) == 4
    found = restarts(pod)
    assert (found.count, found.failure.signal) == (1, 9)
    assert found.failure.rank in ((1,) if rank == 1 else (0, 1))
    assert found.failure.reason == "ProgressDeadlineExceeded"
    assert pod.report.failure is None
    assert "no rank does a step: killing ranks 1; the others wait for it" in pod.log or rank == ""


def without_reports(pod: Pod) -> list[dict[str, object]]:
    code, answer = ask(pod, "/v1/status")
    assert code == 200
    return [{"exitCode": None} | one for one in answer["ranks"]]


def test_ranks_that_have_got_on_or_are_others_are_not_killed(hangs: Callable[..., Pod]) -> None:
    pod = hangs()
    for change in ({"attempt": 2}, {"generation": 1}, {"step": 3}, {"step": 5}):
        assert order(pod, **change) == (200, {"restarts": False})
    assert order(pod, token="another")[0] == 401
    for change in ({"rank": "x"}, {"step": ""}, {"attempt": -1}):
        assert order(pod, **change)[0] == 400
    code, answer = order(pod, rank=2)
    assert (code, answer) == (409, {"error": "no restart in place: the job has 2 ranks, and no rank 2"})
    assert ask(pod, RESTART_PATH)[0] == 405
    assert {one["exitCode"] for one in without_reports(pod)} == {None}
    assert len(list(pod.folder.glob("life-*"))) == 2


def test_where_the_restarts_are_used_up_nobody_is_killed_and_the_answer_says_so(hangs: Callable[..., Pod]) -> None:
    pod = hangs(restarts="0")
    code, answer = order(pod)
    assert code == 409
    assert "0 restarts in place without a new checkpoint are used up" in json.dumps(answer)
    assert {one["exitCode"] for one in without_reports(pod)} == {None}
