"""Failures of programs of the user's own: all that is known of them is their exit code and the end of their log."""

from typing import Any

import pytest

from disttrain_api.report import RankFailure
from tests.builders import a_report
from tests.recorded import kept, torchrun_log
from tests.unit.decide.test_failures import own_world, verdict

VALUE_ERROR = "ValueError (its log says more)"


def test_a_child_of_torchrun_that_was_killed_is_named_with_its_signal() -> None:
    world = own_world().end(1, 1, message=kept(torchrun_log("killed"))).settle()
    found = verdict(world)
    assert (found.class_, found.rank, found.signal, found.exit_code) == ("Killed", 1, 9, 1)
    assert found.message.endswith("was killed by signal 9 (torchrun exited with code 1)")


def test_a_child_of_torchrun_that_was_killed_for_memory_is_out_of_memory() -> None:
    world = own_world().end(1, 1, message=kept(torchrun_log("killed")), reason="OOMKilled").settle()
    found = verdict(world)
    assert (found.class_, found.rank, found.signal) == ("OutOfMemory", 1, 9)


@pytest.mark.parametrize("name", ["recorded", "raised_of_one_rank"])
def test_the_exception_of_a_child_of_torchrun_is_in_the_verdict(name: str) -> None:
    world = own_world().end(0, 1, message=kept(torchrun_log(name))).settle().pass_time(3).settle()
    found = verdict(world)
    assert (found.class_, found.rank, found.signal) == ("Program", 1, None)
    assert found.message.endswith(f"exited with code 1 (torchrun exited with code 1): {VALUE_ERROR}")


def test_where_the_exception_is_cut_off_the_verdict_says_how_to_see_it() -> None:
    world = own_world().end(0, 1, message=kept(torchrun_log("raised"))).settle().pass_time(3).settle()
    found = verdict(world)
    assert found.rank == 1
    assert "look at the pod's log" in found.message
    assert "===" not in found.message


def test_a_torchrun_whose_rank_lost_its_peer_is_a_symptom() -> None:
    world = own_world().end(0, 1, message=kept(torchrun_log("peer_of_one_rank"))).settle()
    assert world.job.status.attempts[0].verdict is None, "its cause is awaited"
    world.pass_time(5).end(1, 1, message=kept(torchrun_log("raised_of_one_rank"))).settle().pass_time(3).settle()
    assert verdict(world).message.endswith(VALUE_ERROR)


def test_a_rule_on_signals_sees_the_signal_of_a_child() -> None:
    rule: dict[str, Any] = {"action": "FailJob", "signals": [9]}
    world = own_world(rule).end(1, 1, message=kept(torchrun_log("killed"))).settle()
    assert verdict(world).action == "FailJob"


def test_the_error_of_a_session_counts_and_not_the_code_that_torchrun_ends_with() -> None:
    broken = a_report(40, checkpoint=40, failure=RankFailure(rank=3, exit_code=87, message="step-40 is damaged"))
    world = own_world().end(0, 1, report=broken).settle()
    found = verdict(world)
    assert (found.class_, found.reason, found.rank) == ("Configuration", "CheckpointBroken", 3)
    assert found.message.endswith("exited with code 1: step-40 is damaged")
    assert world.job.status.checkpoint.step == 40


def test_a_program_that_reported_no_error_is_looked_up_in_its_log() -> None:
    world = own_world().end(0, 1, report=a_report(100)).settle().pass_time(3).settle()
    assert verdict(world).message.endswith("it has reported its progress and no error: look at the pod's log")


def test_the_exception_of_a_program_is_in_the_verdict_also_where_lines_follow_it() -> None:
    log = 'Traceback (most recent call last):\n  File "/app/a.py", line 3, in <module>\n    f()\nKeyError: 1\nbye\n'
    world = own_world().end(1, 1, message=log).settle().pass_time(3).settle()
    assert verdict(world).message.endswith("exited with code 1: KeyError (its log says more)")
