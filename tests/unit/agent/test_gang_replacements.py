"""Pods that are lost and have replacements: whom the others wait for, how long, and who takes no part any more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import Kind, Message, PodFailure, leaves
from disttrain_agent.life import Timing
from disttrain_agent.reports import TerminationMessage
from disttrain_agent.restart import Limits
from disttrain_agent.supervise import Supervisor
from disttrain_api.names import REPLACEMENT_SECONDS, ExitCode
from disttrain_api.report import decode_pod_report
from tests.unit.agent.test_http_api import a_port

from .test_gang_decisions import LONGEST, PATIENCE, WINDOW, a_leader, all_end, exited, killed, orders


def lost_pod(leader: Leader, worker: int = 2, now: float = 0.0) -> None:
    """A pod is lost, and the others have noticed and ended their ranks."""
    leader.lost(worker)
    for other in {0, 1, 2} - {worker}:
        leader.ended(other, leader.generation, exited(ExitCode.PEER_LOST, other), now)


def test_the_next_generation_waits_for_another_pod_in_place_of_a_lost_one_and_starts_with_it() -> None:
    leader = Leader(3, Limits(0, 10), WINDOW, PATIENCE, LONGEST, ranks_per_pod=4)
    assert all(leader.joins(worker, 0, 0.0) for worker in (1, 2))
    lost_pod(leader)
    leader.tick(PATIENCE + 1)
    assert (leader.left, leader.awaited, leader.due) == (None, {2}, LONGEST)
    assert orders(leader) == [(Kind.STOP, 0)]
    assert leader.joins(2, 0, 300.0, replacement=1)
    leader.tick(300.0)
    assert (orders(leader), leader.generation, leader.awaited) == ([(Kind.START, 1)], 1, frozenset())
    assert leader.restart is not None, "although no restart of ranks is left: the operator counts this one"
    assert (leader.restart.count, leader.restart.pause_seconds) == (1, 0)
    assert (leader.restart.cause.rank, leader.restart.cause.reason) == (8, "PodLost")


def test_a_lost_pod_that_has_no_replacement_in_time_ends_the_wait_of_all() -> None:
    leader = a_leader()
    lost_pod(leader, now=5.0)
    leader.tick(5.0 + LONGEST - 0.1)
    assert leader.left is None
    leader.tick(5.0 + LONGEST)
    assert leader.left is not None
    assert leader.left.why == "no other pod of worker 2 has joined in time"


def test_a_replacement_is_the_first_sign_of_a_loss_that_no_rank_has_noticed() -> None:
    leader = a_leader()
    assert leader.joins(2, 0, 100.0, replacement=3)
    leader.tick(100.0 + WINDOW)
    assert (orders(leader), leader.must_stop) == ([(Kind.STOP, 0)], True)
    for worker in (0, 1):
        leader.ended(worker, 0, killed(worker, signaled=True), 103.0)
    leader.tick(103.0)
    assert orders(leader) == [(Kind.START, 1)]


def test_a_pod_that_another_one_has_replaced_takes_no_part_whenever_it_comes() -> None:
    leader = a_leader()
    lost_pod(leader)
    assert leader.joins(2, 0, 1.0, replacement=2)
    for former in (0, 1):
        assert not leader.joins(2, 0, 2.0, replacement=former)
        assert leader.is_former(2, former)
    leader.lost(2)
    assert not leader.joins(2, 0, 3.0, replacement=1), "nor while another one is awaited"
    assert leader.joins(2, 0, 3.0, replacement=2), "as long as it was ordered nothing it may come again"
    assert leader.joins(2, 0, 4.0, replacement=5)
    leader.tick(4.0)
    assert leader.generation == 1
    assert not leader.joins(2, 0, 5.0, replacement=5), "the others have started, and it has not heard of it"
    assert leader.is_behind(0)
    for former in (0, 1, 2):
        assert not leader.joins(2, former, 5.0, replacement=former)
    assert leader.joins(2, 1, 5.0, replacement=5), "after a short loss of its connection"
    assert not leader.is_former(2, 5)
    leader.tick(1000.0)
    assert (leader.generation, leader.due, leader.left) == (1, None, None)


def test_a_replacement_that_is_lost_before_all_start_is_awaited_again() -> None:
    leader = a_leader()
    lost_pod(leader)
    assert leader.joins(2, 0, 1.0, replacement=1)
    leader.lost(2)
    leader.tick(2.0)
    assert (leader.generation, leader.awaited, leader.due) == (0, {2}, LONGEST)


@pytest.mark.parametrize("end", [exited(ExitCode.STOPPED, 1), killed(1, signaled=True), exited(ExitCode.PEER_LOST)])
def test_a_pod_that_departs_may_have_all_save_a_checkpoint_and_is_replaced(end: PodFailure) -> None:
    leader = a_leader()
    leader.departs(2)
    leader.tick(500.0)
    assert (leader.due, leader.must_stop) == (None, False), "nobody is stopped for it"
    for worker in (0, 1):
        leader.ended(worker, 0, end, 500.0)
    leader.ended(2, 0, exited(ExitCode.STOPPED, 2), 500.0)
    leader.tick(501.0)
    assert (leader.left, leader.awaited) == (None, {2})
    assert leader.joins(2, 0, 510.0, replacement=1)
    leader.tick(510.0)
    assert leader.generation == 1


def test_a_rank_that_was_asked_to_stop_in_no_departing_pod_ends_all_pods() -> None:
    leader = a_leader()
    all_end(leader, *(exited(ExitCode.STOPPED, worker) for worker in range(3)))
    assert leader.left is not None
    assert leader.left.why == "Stopped is not for this pod to repair"


@pytest.mark.parametrize("end", [exited(ExitCode.INVALID_CONFIGURATION), exited(ExitCode.DISK_FULL)])
def test_no_replacement_repairs_what_failed_in_another_pod(end: PodFailure) -> None:
    leader = a_leader()
    leader.lost(2)
    leader.ended(0, 0, exited(ExitCode.PEER_LOST, 0), 0.0)
    leader.ended(1, 0, end, 0.0)
    assert leader.joins(2, 0, 1.0, replacement=1)
    assert leader.left is not None


def test_lost_pods_use_up_no_restart_of_ranks() -> None:
    leader = a_leader(restarts=1, backoff=0)
    for number in (1, 2, 3):
        lost_pod(leader)
        assert leader.joins(2, 0, 0.0, replacement=number)
        leader.tick(0.0)
        assert leader.generation == number
    all_end(leader, killed(0), killed(1), killed(2))
    leader.tick(0.0)
    assert (leader.generation, leader.left) == (4, None)
    all_end(leader, killed(0), killed(1), killed(2))
    assert leader.left is not None


def test_a_replacement_starts_its_ranks_when_it_is_ordered_to_in_whatever_generation() -> None:
    member = Member(replacement=4)
    member.connected()
    assert [(order.kind, order.replacement) for order in member.orders] == [(Kind.JOINS, 4)]
    assert member.generation == 0
    member.receive(Message(kind=Kind.START, generation=7))
    assert (member.generation, member.left) == (7, None)
    for late in (Message(kind=Kind.START, generation=8), Message(kind=Kind.STOP, generation=0), leaves(0, "late")):
        member.receive(late)
    assert (member.generation, member.must_stop, member.left) == (7, False, None)
    member.lost()
    assert member.left is None, "its ranks train"


def test_a_replacement_that_waits_ends_with_the_gang_and_not_with_its_connection() -> None:
    member = Member(replacement=1, longest=LONGEST)
    member.connected()
    member.lost()
    member.orders.clear()
    member.connected()
    assert [(order.kind, order.generation, order.replacement) for order in member.orders] == [(Kind.JOINS, 0, 1)]
    member.receive(leaves(3, "for a reason"))
    member.receive(Message(kind=Kind.START, generation=1))
    assert (member.left is not None, member.generation) == (True, 0)


def test_a_member_departs_alone() -> None:
    member = Member()
    member.connected()
    member.orders.clear()
    member.depart("SIGTERM to the pod")
    member.ended(exited(ExitCode.STOPPED))
    assert [order.kind for order in member.orders] == [Kind.DEPARTS]
    assert member.left is not None


@pytest.mark.usefixtures("without_orphans")
@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("of the job", "worker 0's agent has not ordered a start in time"),
        ("", "it has no token of its job, or no port for its gang"),
    ],
    ids=["nobody leads", "it cannot join"],
)
async def test_a_replacement_that_nobody_orders_to_start_ends_in_time_without_having_started_a_rank(
    tmp_path: Path, token: str, why: str
) -> None:
    (tmp_path / "token").write_text(token)
    pod = PodEnvironment(1, 1, "127.0.0.1", tmp_path / "job.json", tmp_path, 1.0, {})
    in_place: dict[str, Any] = {
        "restarts_in_place": Limits(3, 0),
        "workers": 2,
        "gang_port": a_port(),
        "replacement": 1,
    }
    pod = replace(pod, job_uid="uid-1", attempt=1, **in_place)
    message = TerminationMessage(tmp_path / "termination-message")
    started = tmp_path / "started"
    ended = await Supervisor(pod, ["touch", str(started)], message, timing=Timing(replacement=0.1)).run()
    report = decode_pod_report((tmp_path / "termination-message").read_text())
    assert ended == ExitCode.PEER_LOST
    assert report is not None
    assert report.failure is not None
    assert (report.failure.exit_code, report.failure.message) == (ExitCode.PEER_LOST, why)
    assert not started.exists()


def test_the_operator_gives_up_before_the_agents_do() -> None:
    assert Timing().gang < REPLACEMENT_SECONDS < Timing().replacement


def test_a_pod_that_others_have_started_takes_no_part() -> None:
    leader = a_leader()
    assert not leader.joins(2, 1, 300.0, replacement=1), "nobody here has had a start"
    assert leader.due is None
