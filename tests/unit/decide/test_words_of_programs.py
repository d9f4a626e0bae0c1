"""What a program prints reaches status and Events only where its job asks for it: they are read without its log."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from disttrain_api.names import ExitCode
from disttrain_api.report import FailureSignature, RankFailure
from disttrain_operator.decide.pod_events import what_holds_up
from tests.builders import a_report, an_init_status, initializing
from tests.unit.decide.test_failures import OWN, own_world
from tests.unit.decide.world import World, a_running_world, a_world

SECRET = "hunter2"
TRACEBACK = f'Traceback (most recent call last):\n  File "/a.py", line 3, in f\n    f()\nOddity: {SECRET}\n'
TORCHRUN = (
    f"{TRACEBACK}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n"
)
AT = FailureSignature(error="ValueError", place="/app/data.py:33", step=4)


def own(message: str, code: int = 1) -> Callable[[], World]:
    """A program of one's own that ends so."""
    return lambda: own_world().end(1, code, message=message)


def failed_with(failure: RankFailure, code: int = 1) -> Callable[[], World]:
    """A rank of our trainer of which its agent says so."""
    return lambda: a_running_world().end(1, code, report=a_report(5, failure=failure))


def before_the_program(phase: str, **how: Any) -> World:
    """A pod with an init container, or a sidecar, that ended badly."""
    world = a_world(**OWN).settle()
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": SECRET, "finishedAt": "2026-01-01T12:00:00Z"}}
    return world.put(initializing(world.pod(0), an_init_status("fetch", ended), phase=phase, **how))


def hook() -> World:
    world = a_world(**OWN).settle()
    sentence = f"Exec lifecycle hook failed: {SECRET}"
    waits = an_init_status("fetch", {"waiting": {"reason": "PostStartHookError", "message": sentence}})
    return world.put(initializing(world.pod(0), waits))


def beside_the_program() -> World:
    world = a_running_world(**OWN)
    pod = deepcopy(world.pod(1))
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": SECRET}}
    pod["status"]["containerStatuses"].append({"name": "shipper", "state": ended})
    return world.put(pod)


ENDS: dict[str, tuple[Callable[[], World], str]] = {
    "last line": (own(f"one\npassword {SECRET}\n", 3), "exited with code 3: its log says why"),
    "line like a pair": (own(f"password: {SECRET}\n"), "exited with code 1: its log says why"),
    "exception": (own(TRACEBACK), "exited with code 1: Oddity (its log says more)"),
    "no such command": (own(f"sh: {SECRET}: not found", 127), "exited with code 127: its command was not found"),
    "child of torchrun": (own(TORCHRUN), ": Oddity (its log says more)"),
    "killed": (own(SECRET, 137), "was killed by signal 9 (exit code 137)"),
    "rank": (
        failed_with(
            RankFailure(rank=1, exit_code=1, message=f"ValueError: {SECRET}", unquoted="ValueError", signature=AT)
        ),
        "exited with code 1: ValueError at /app/data.py:33 (its log says more)",
    ),
    "rank of an older image": (
        failed_with(RankFailure(rank=1, exit_code=1, message=f"ValueError: {SECRET}", signature=AT)),
        "exited with code 1: ValueError at /app/data.py:33 (its log says more)",
    ),
    "what our trainer quotes": (
        failed_with(
            RankFailure(rank=1, exit_code=82, message=f"importing m raised E: {SECRET}", unquoted="m raised E: …"),
            ExitCode.ENTRYPOINT_NOT_IMPORTABLE,
        ),
        "exited with code 82: m raised E: …",
    ),
    "init container": (lambda: before_the_program("Failed"), "exited with code 3: its log says why"),
    "sidecar": (lambda: before_the_program("Pending", sidecars=("fetch",)), "fetch failed (exit code 3)"),
    "hook": (hook, "Exec lifecycle hook failed"),
    "further container": (beside_the_program, "shipper failed (exit code 3)"),
}


@pytest.mark.parametrize(("world", "sentence"), ENDS.values(), ids=ENDS)
def test_what_a_program_prints_is_left_to_its_log(world: Callable[[], World], sentence: str) -> None:
    """Red where a verdict has a rank's message with what its program said."""
    ended = world().settle().pass_time(5).settle()
    published = str([ended.job.status.model_dump(mode="json"), *(event.message for event in ended.events)])
    assert sentence in published
    assert SECRET not in published


@pytest.mark.parametrize("message", [f"one\npassword {SECRET}\n", TRACEBACK, TORCHRUN])
def test_a_job_may_ask_for_it(message: str) -> None:
    ended = own_world(failureLogInStatus=True).end(1, 1, message=message).pass_time(5).settle()
    found = ended.job.status.attempts[0].verdict
    assert SECRET in found.message
    assert SECRET in (found.log or "")


@pytest.mark.parametrize("reason", ["Unhealthy", "FailedPostStartHook"])
def test_events_that_pass_on_the_output_of_a_probe_or_a_hook_are_cut_before_it(reason: str) -> None:
    """Red where the whole message of such an Event is shown."""
    event = {"type": "Warning", "reason": reason, "message": f"Startup probe failed: {SECRET}"}
    found = what_holds_up("uid", [event | {"lastTimestamp": "2026-01-01T12:00:00Z"}])
    assert found.message == "Startup probe failed"
