"""The agent starts its ranks again in the pod: all of them, after all have ended, and it says so."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import pytest

from disttrain_api.names import Env, ExitCode
from disttrain_api.report import RestartsInPlace
from tests.waiting import GENEROUS

from .conftest import PRELUDE, Pod, read_json
from .test_http_api import JOB_TOKEN, a_port, status_of_when_let_in

Pods = Callable[..., Pod]

LIVES = f"""
def life():
    # The first rank to come counts, once for all of a life: none of the next one starts before all have ended.
    marks = sorted(path.name for path in folder.glob(f"life-*.{{rank}}"))
    number = len(marks) + 1
    (folder / f"life-{{number}}.{{rank}}").write_text(str(os.getpid()))
    return number

def reports():
    return sorted(path.name for path in pathlib.Path(os.environ["{Env.REPORT_DIR}"]).iterdir() if path.stat().st_size)

def wait(pattern):
    while not list(folder.glob(pattern)):
        time.sleep(0.01)

number = life()
"""
FINISH = "report(step=9, totalSteps=9, done=True)"


def in_place(pods: Pods, ranks: int = 2, restarts: str = "3", backoff: str = "0", **changes: str) -> Pod:
    limits = {Env.RESTARTS_IN_PLACE: restarts, Env.RESTART_BACKOFF_SECONDS: backoff}
    first = {Env.NODE_RANK: "0", Env.WORLD_SIZE: str(ranks)}
    return pods(ranks, **(limits | first | changes))


def restarts(pod: Pod) -> RestartsInPlace:
    found = pod.report.restarts_in_place
    assert found is not None
    return found


def test_a_killed_rank_starts_again_with_its_peers_and_the_pod_succeeds(pods: Pods) -> None:
    pod = in_place(pods)
    code = pod.run(
        LIVES
        + f"""
if number == 1:
    wait("life-1.0"), wait("life-1.1")
    if rank == 1:
        report(step=4, totalSteps=9, checkpoint=dict(step=3, path="/c/3", time="2026-01-01T12:00:00Z"))
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
note("env", json.dumps(dict(os.environ)))
note("found", reports())
{FINISH}
"""
    )
    assert code == 0, pod.log
    assert sorted(path.name for path in pod.folder.glob("life-*")) == ["life-1.0", "life-1.1", "life-2.0", "life-2.1"]
    first, second = (read_json(pod.seen("env")[rank]) for rank in (0, 1))
    assert (first[Env.RANK], second[Env.RANK]) == ("0", "1")
    assert pod.report.failure is None
    assert pod.progress.done
    found = restarts(pod)
    assert (found.count, found.failure.rank, found.failure.signal, found.pause_seconds) == (1, 1, 9, 0)
    assert pod.progress.checkpoint is not None, "what a former life has written is known"
    assert pod.progress.checkpoint.step == 3


def test_a_rank_that_was_stopped_after_another_had_lost_a_peer_keeps_nobody_from_starting_again(pods: Pods) -> None:
    pod = in_place(pods)
    program = f"""
if number == 1 and rank == 1:
    wait("life-1.0"), wait("ready-0")
    sys.exit({ExitCode.PEER_LOST:d})
if number == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit({ExitCode.STOPPED:d}))
    ready(), signal.pause()
{FINISH}
"""
    assert pod.run(LIVES + program) == 0, pod.log
    assert (restarts(pod).count, restarts(pod).failure.exit_code) == (1, ExitCode.PEER_LOST)


def test_no_report_of_the_former_life_is_there_when_the_next_one_begins(pods: Pods) -> None:
    pod = in_place(pods, ranks=1)
    program = f"""
if number == 1:
    (pathlib.Path(os.environ["{Env.REPORT_DIR}"]) / "meeting").touch()
    report(step=4, totalSteps=9, error=dict(exitCode=1, reason="RankFailed", message="no"))
    sys.exit(1)
note("found", reports())
note("meeting", (pathlib.Path(os.environ["{Env.REPORT_DIR}"]) / "meeting").exists())
{FINISH}
"""
    assert pod.run(LIVES + program) == 0, pod.log
    assert (pod.seen("found"), pod.seen("meeting")) == ({0: "[]"}, {0: "False"})


def test_two_lives_never_run_side_by_side_not_even_what_left_its_process_group(pods: Pods) -> None:
    """A data loader of the first life holds what the second one needs, for example rank 0's port."""
    pod = in_place(pods)
    program = f"""
if number == 1:
    if os.fork() == 0:
        os.setsid()
        note("orphan", os.getpid())
        signal.pause()
    wait(f"orphan.{{rank}}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait("life-1.0"), wait("life-1.1"), wait("orphan.0"), wait("orphan.1")
    if rank == 1:
        sys.exit(3)
    signal.pause()
former = [int(path.read_text()) for path in [*folder.glob("life-1.*"), *folder.glob("orphan.*")]]
note("alive", [pid for pid in former if os.path.exists(f"/proc/{{pid}}")])
{FINISH}
"""
    assert pod.run(LIVES + program) == 0, pod.log
    assert pod.seen("alive") == {0: "[]", 1: "[]"}
    assert len(pod.seen("orphan")) == 2


@pytest.mark.parametrize(
    ("failure", "code"), [("sys.exit(81)", 81), ("sys.exit(94)", 94), ("sys.exit(143)", ExitCode.STOPPED)]
)
def test_what_no_restart_here_can_mend_ends_the_pod_as_without_the_setting(pods: Pods, failure: str, code: int) -> None:
    pod = in_place(pods, ranks=1)
    assert pod.run(LIVES + failure) == code
    assert len(list(pod.folder.glob("life-*"))) == 1
    assert pod.report.restarts_in_place is None
    assert pod.failure.exit_code == code


def test_without_the_setting_a_failure_ends_the_pod(pods: Pods) -> None:
    pod = pods(1)
    assert pod.run(LIVES + "sys.exit(1)") == 1
    assert len(list(pod.folder.glob("life-*"))) == 1


def test_restarts_are_used_up_and_the_termination_message_has_them_and_the_last_failure(pods: Pods) -> None:
    pod = in_place(pods, ranks=1, restarts="2")
    assert pod.run(LIVES + "report(step=number, totalSteps=9); sys.exit(10 + number)") == 13
    assert len(list(pod.folder.glob("life-*"))) == 3
    assert (restarts(pod).count, restarts(pod).failure.exit_code) == (2, 12)
    assert (pod.failure.exit_code, pod.failure.repeated) == (13, False)
    assert pod.progress.step == 3


def test_the_same_failure_again_ends_the_pod_and_is_called_so(pods: Pods) -> None:
    pod = in_place(pods, ranks=1)
    signature = {"error": "NameError", "place": "/app/m.py:1", "step": 4, "stepsDone": 4}
    error = {"exitCode": 1, "reason": "RankFailed", "message": "NameError: x", "signature": signature}
    assert pod.run(LIVES + f"report(step=4, totalSteps=9, error={error!r}); sys.exit(1)") == 1
    assert len(list(pod.folder.glob("life-*"))) == 2
    assert (pod.failure.repeated, restarts(pod).count) == (True, 1)


def test_sigterm_ends_a_pause_and_the_pod_keeps_its_progress(pods: Pods) -> None:
    pod = in_place(pods, ranks=1, backoff="3600").start(LIVES + "report(step=number, totalSteps=9); sys.exit(7)")
    pod.until(lambda: "restart 2 in place after 3600 s" in pod.log, "the second restart waits")
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 7
    assert len(list(pod.folder.glob("life-*"))) == 2
    assert (pod.failure.exit_code, pod.progress.step) == (7, 2)


def test_a_pod_that_was_asked_to_stop_starts_nothing_again_and_reports_no_restart(pods: Pods) -> None:
    pod = in_place(pods, ranks=1)
    stop = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    pod.start(LIVES + f"{stop}; report(step=1, totalSteps=9); ready(); time.sleep(1000)")
    pod.until_ready().signal(signal.SIGTERM)
    assert pod.wait() == ExitCode.STOPPED
    assert len(list(pod.folder.glob("life-*"))) == 1
    assert pod.report.restarts_in_place is None


def test_ranks_that_cannot_be_started_again_end_the_pod_with_what_is_known(pods: Pods) -> None:
    pod = in_place(pods, ranks=1)
    python, program = pod.folder / "python", pod.folder / "rank.py"
    python.symlink_to(sys.executable)
    (pod.folder / "job.json").write_text("{}")
    program.write_text(PRELUDE + LIVES + "report(step=4, totalSteps=9); (folder / 'python').unlink(); sys.exit(1)")
    assert pod.start_command([str(python), str(program)]).wait() == 1
    assert "cannot start the ranks" in (pod.failure.message or "")
    assert (pod.progress.step, restarts(pod).count) == (4, 1)


@pytest.mark.parametrize(("name", "text"), [(Env.RESTARTS_IN_PLACE, "1001"), (Env.RESTART_BACKOFF_SECONDS, "soon")])
def test_limits_that_no_operator_gives_are_named(pods: Pods, name: str, text: str) -> None:
    pod = in_place(pods, ranks=1, **{name: text})
    assert pod.run("pass") == ExitCode.INVALID_CONFIGURATION
    assert name in (pod.failure.message or "")


def test_a_flood_at_the_agents_port_keeps_no_rank_from_starting_again(pods: Pods) -> None:
    port = a_port()
    pod = in_place(pods, **{Env.AGENT_PORT: str(port), Env.JOB_UID: "uid-1", Env.ATTEMPT: "3"})
    (pod.folder / "token").write_text(JOB_TOKEN)
    waits = "ready()\nwhile number == 1 or not (folder / 'on').exists():\n    time.sleep(0.01)\n"
    pod.start(LIVES + waits + FINISH).until_ready()
    pod.until(lambda: sum(bool(path.read_text()) for path in pod.folder.glob("life-1.*")) == 2, "both ranks run")
    with contextlib.ExitStack() as flood:
        for _ in range(300):
            flood.enter_context(socket.create_connection(("127.0.0.1", port), GENEROUS))
        os.kill(int((pod.folder / "life-1.1").read_text()), signal.SIGKILL)
        pod.until(lambda: len(list(pod.folder.glob("life-2.*"))) == 2, "both ranks start again")
    status = status_of_when_let_in(pod)
    assert (status.generation, status.refused["connections"] > 100) == (1, True)
    (pod.folder / "on").touch()
    assert pod.wait() == 0, pod.log
    assert restarts(pod).count == 1
