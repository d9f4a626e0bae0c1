"""The agent as a process, with real processes as its ranks."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from disttrain_agent.supervise import Timing
from disttrain_api.names import Env, ExitCode
from disttrain_operator.plan.ranks_probe import startup_probe
from tests.waiting import GENEROUS

from .conftest import AGENT, Pod, read_json

PROBE: list[str] = startup_probe()["exec"]["command"]
Pods = Callable[..., Pod]

OBEDIENT = """
def stop(*_):
    note("stopped")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
ready()
while True:
    time.sleep(0.01)
"""
DEAF = """
signal.signal(signal.SIGTERM, lambda *_: note("heard"))
ready()
while True:
    time.sleep(0.01)
"""


def test_every_rank_gets_the_environment_that_torchrun_would_give(pods: Pods) -> None:
    pod = pods(2)
    assert pod.run("note('env', json.dumps(dict(os.environ)))") == 0
    seen = {rank: read_json(text) for rank, text in pod.seen("env").items()}
    assert sorted(seen) == [2, 3]
    for rank, environment in seen.items():
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "1",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            Env.REPORT_DIR: str(pod.folder / "scratch" / "reports"),
        }
        assert {name: environment[name] for name in expected} == expected


def test_a_number_of_threads_that_the_template_asks_for_stays(pods: Pods) -> None:
    pod = pods(2, OMP_NUM_THREADS="3")
    assert pod.run("note('threads', os.environ['OMP_NUM_THREADS'])") == 0
    assert pod.seen("threads") == {2: "3", 3: "3"}


def test_every_line_carries_its_rank_also_the_last_one_without_an_end(pods: Pods) -> None:
    pod = pods(2)
    assert pod.run("print('one'); sys.stderr.write('two'); sys.stderr.flush()") == 0
    for rank in (2, 3):
        assert [line for line in pod.log.splitlines() if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] one",
            f"[rank {rank}] two",
        ]


def test_output_that_never_ends_a_line_is_passed_on(pod: Pod) -> None:
    assert pod.run("sys.stdout.write('z' * 100_000)") == 0
    assert pod.log.count("z") == 100_000


def test_a_log_that_cannot_be_written_does_not_end_the_training(pod: Pod) -> None:
    pod.folder.joinpath("log").unlink(missing_ok=True)
    pod.folder.joinpath("log").symlink_to("/dev/full")
    assert pod.run("print('lost'); note('done')") == 0
    assert list(pod.seen("done")) == [1]


def test_sigterm_reaches_every_rank_once_and_ends_with_143(pods: Pods) -> None:
    pod = pods(3).start(
        """
        heard = []
        def stop(*_):
            heard.append(1)
        signal.signal(signal.SIGTERM, stop)
        report(step=7, totalSteps=9)
        ready()
        while not heard:
            time.sleep(0.01)
        time.sleep(0.3)
        note("heard", len(heard))
        sys.exit(143)
        """
    )
    pod.until_ready().signal(signal.SIGTERM)
    pod.until(lambda: "stopping" in pod.log, "the first signal is obeyed")
    pod.signal(signal.SIGTERM)
    pod.signal(signal.SIGINT)
    assert pod.wait() == ExitCode.STOPPED
    assert pod.seen("heard") == {3: "1", 4: "1", 5: "1"}
    assert pod.report.failure is None
    assert pod.progress.step == 7


def test_sigint_is_passed_on_as_sigterm(pod: Pod) -> None:
    pod.start(OBEDIENT).until_ready().signal(signal.SIGINT)
    assert pod.wait() == ExitCode.STOPPED
    assert list(pod.seen("stopped")) == [1]


@pytest.mark.parametrize("grace", [1.0, 4.0, 60.0])
def test_ranks_are_killed_while_the_agent_still_has_time_to_report(grace: float) -> None:
    assert grace / 2 <= Timing().kill_after(grace) < grace


def test_ranks_that_do_not_stop_are_killed(pods: Pods) -> None:
    pod = pods(2, **{Env.GRACE_SECONDS: "4"}).start(DEAF)
    pod.until_ready().signal(signal.SIGTERM)
    assert pod.wait() == ExitCode.STOPPED
    assert "killing ranks 2, 3" in pod.log
    assert sorted(pod.seen("heard")) == [2, 3]


def test_ranks_that_end_well_after_sigterm_have_succeeded(pod: Pod) -> None:
    pod.start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); time.sleep(1000)")
    pod.until_ready().signal(signal.SIGTERM)
    assert pod.wait() == 0


def test_a_permanent_failure_while_stopping_is_not_hidden(pod: Pod) -> None:
    pod.start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(85)); ready(); time.sleep(1000)")
    pod.until_ready().signal(signal.SIGTERM)
    assert pod.wait() == ExitCode.STORAGE_FULL
    assert pod.failure.reason == "StorageFull"


@pytest.mark.parametrize(
    ("program", "code", "signal_number"),
    [
        ("sys.exit(3)", 3, None),
        ("sys.exit(81)", ExitCode.DATA_NOT_FOUND, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, 9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, 11),
    ],
)
def test_the_first_failing_rank_decides(pods: Pods, program: str, code: int, signal_number: int | None) -> None:
    pod = pods(3)
    assert pod.run(f"if rank == 4:\n    print('why'); {program}\n{OBEDIENT}") == code
    assert sorted(pod.seen("stopped")) == [3, 5], "the others were asked to stop"
    failure = pod.failure
    assert (failure.rank, failure.exit_code, failure.signal) == (4, code, signal_number)
    assert failure.log_tail == "why"


def test_peers_that_do_not_stop_are_killed_after_a_short_grace(pods: Pods) -> None:
    pod = pods(2, **{Env.GRACE_SECONDS: "1000"})
    assert pod.run("if rank == 2:\n    sys.exit(3)\n" + DEAF) == 3
    assert list(pod.seen("heard")) == [3]


@pytest.mark.parametrize("symptom", ["sys.exit(91)", "report(error=LOST); os.abort()", "os.abort()"])
def test_a_lost_peer_is_a_symptom_also_where_it_is_seen_first(pods: Pods, symptom: str) -> None:
    pod = pods(2)
    code = pod.run(
        f"""
        LOST = dict(exitCode=91, reason="PeerLost", message="rank 3 is gone")
        if rank == 2:
            note("gone")
            {symptom}
        while not (folder / "gone.2").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(1)
        """
    )
    assert code == 1
    assert pod.failure.rank == 3


def test_what_a_rank_says_of_its_failure_counts_more_than_how_its_process_ended(pod: Pod) -> None:
    error = {"exitCode": 81, "reason": "DataNotFound", "message": "no file /data/x"}
    assert pod.run(f"report(step=3, error={error}); os.abort()") == ExitCode.DATA_NOT_FOUND
    failure = pod.failure
    assert (failure.exit_code, failure.signal, failure.reason) == (81, None, "DataNotFound")
    assert failure.message == "no file /data/x"
    assert pod.progress.step == 3


def test_work_reported_as_done_is_done_even_if_the_process_aborts(pods: Pods) -> None:
    pod = pods(2)
    assert pod.run("report(step=5, done=True)\nif rank == 3:\n    os.abort()") == 0
    assert pod.report.failure is None
    assert pod.progress.rank == 2


def test_a_long_log_tail_still_fits_a_termination_message(pod: Pod) -> None:
    assert pod.run("[print('é' * 500) for _ in range(100)]; print('the end'); sys.exit(1)") == 1
    assert (pod.folder / "termination-log").stat().st_size <= 4096
    assert pod.failure.log_tail.endswith("the end")


def test_the_termination_message_holds_progress_before_the_end(pod: Pod) -> None:
    pod.start("report(step=4, totalSteps=9); ready(); time.sleep(1000)").until_ready()
    pod.until((pod.folder / "termination-log").read_text, "a container that is killed has left its progress")
    pod.signal(signal.SIGKILL)
    assert pod.wait() == -9
    assert pod.progress.step == 4


def test_reports_of_a_former_life_are_forgotten(pod: Pod) -> None:
    reports = pod.folder / "scratch" / "reports"
    reports.mkdir(parents=True)
    (reports / "rank-1.json").write_text('{"rank": 1, "done": true}')
    assert pod.run("os.abort()") == 134


def test_ranks_do_not_meet_where_those_of_a_former_life_did(pod: Pod) -> None:
    meeting = pod.folder / "scratch" / "reports" / "meeting"
    meeting.parent.mkdir(parents=True)
    meeting.write_text("keys of a former life")
    assert pod.run(f"sys.exit(os.path.exists({str(meeting)!r}))") == 0


def test_ranks_and_their_children_do_not_outlive_a_killed_agent(pods: Pods) -> None:
    pod = pods(2).start("note('pid', os.getpid()); ready(); time.sleep(1000)").until_ready()
    pids = [int(text) for text in pod.seen("pid").values()]
    pod.signal(signal.SIGKILL)
    pod.wait()
    pod.until(lambda: not any(_runs(pid) for pid in pids), "the ranks have ended")


def test_children_of_a_killed_rank_do_not_outlive_it(pod: Pod) -> None:
    pod.start(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        note("child", child.pid)
        ready()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert pod.wait() == 137
    child = int(pod.seen("child")[1])
    pod.until(lambda: not _runs(child), "the data loader has ended")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a process namespace needs root and unshare"
)
def test_as_pid_1_it_reaps_orphans(pod: Pod) -> None:
    probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False)
    if probe.returncode != 0:
        pytest.skip("this machine lets nobody make a process namespace")
    pod.before = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    pod.start(
        """
        note("parent", os.getppid())
        # Twenty grandchildren become orphans of the namespace, that is of PID 1, and end.
        for _ in range(20):
            subprocess.run(["sh", "-c", "sh -c 'sleep 0.05' & exit 0"])
        def zombies():
            try:
                files = list(pathlib.Path("/proc").glob("[0-9]*/stat"))
                states = [file.read_text().rpartition(")")[2].split()[0] for file in files]
            except OSError:  # one of them has ended meanwhile
                return None
            return states.count("Z"), len(states)
        while (seen := zombies()) != (0, 2):
            time.sleep(0.01)
        note("processes", json.dumps(seen))
        """
    )
    assert pod.wait() == 0, pod.log
    assert pod.seen("parent") == {1: "1"}
    assert pod.seen("processes") == {1: "[0, 2]"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({Env.CONFIG: "/nowhere/job.json"}, "cannot read the configuration /nowhere/job.json"),
        ({Env.CONFIG: None}, "DISTTRAIN_CONFIG must be set"),
        ({Env.WORLD_SIZE: "many"}, "WORLD_SIZE must be an integer of at least 1, not 'many'"),
        ({Env.NODE_RANK: "7"}, "NODE_RANK 7 with 1 ranks per pod does not fit WORLD_SIZE 2"),
    ],
)
def test_a_pod_without_its_configuration_says_so_in_one_sentence(pods, changes, sentence):
    pod = pods(1, **changes)
    assert pod.run("note('started')") == ExitCode.INVALID_CONFIGURATION
    assert sentence in pod.log
    assert len(pod.log.splitlines()) == 1, pod.log
    assert pod.failure.message is not None
    assert sentence in pod.failure.message
    assert pod.failure.reason == "InvalidConfiguration"
    assert not pod.seen("started")


def test_a_configuration_that_is_not_json_is_named(pod: Pod) -> None:
    (pod.folder / "job.json").write_text("{")
    pod.start_command([sys.executable, "-c", "print('started')"])
    assert pod.wait() == ExitCode.INVALID_CONFIGURATION
    assert "is not JSON" in pod.log
    assert "started" not in pod.log


def test_a_command_that_does_not_exist_is_named(pod: Pod) -> None:
    (pod.folder / "job.json").write_text("{}")
    assert pod.start_command(["/nowhere/trainer"]).wait() == 1
    assert "cannot start the ranks: No such file or directory /nowhere/trainer" in pod.log


def test_sigterm_while_waiting_for_the_master_ends_the_wait(pods: Pods) -> None:
    pod = pods(1, **{Env.MASTER_ADDR: "no-such-host.invalid"}).start("note('started')")
    pod.until(lambda: "waiting for the address of no-such-host.invalid" in pod.log, "the wait is said")
    pod.signal(signal.SIGTERM)
    assert pod.wait() == ExitCode.STOPPED
    assert not pod.seen("started")


def test_the_kubelets_probe_succeeds_once_ranks_have_been_started(pods: Pods) -> None:
    pod = pods(1, **{Env.MASTER_ADDR: "no-such-host.invalid"})
    left = pod.folder / "scratch" / "reports"
    left.mkdir(parents=True)
    (left / "rank-1.json").write_text("of a former life, where the folder outlives its pod")
    pod.start("")
    pod.until(lambda: "waiting for the address of no-such-host.invalid" in pod.log, "the wait is said")
    probe = subprocess.Popen(PROBE, env=pod.environment, stderr=subprocess.PIPE)
    pod.signal(signal.SIGTERM)
    assert pod.wait() == ExitCode.STOPPED
    assert probe.poll() is None
    pod.changes[Env.MASTER_ADDR] = "127.0.0.1"
    pod.start("ready(); time.sleep(1000)").until_ready()
    assert probe.wait(GENEROUS) == 0


def test_the_kubelets_probe_says_what_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.SCRATCH, str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(SystemExit, match="the agent waits for the address of worker 0"):
        exec(PROBE[PROBE.index("-c") + 1], {})


def test_the_agent_never_imports_torch(tmp_path: Path) -> None:
    code = "import sys, disttrain_agent.main; print('torch' in sys.modules, 'numpy' in sys.modules)"
    answer = subprocess.run([AGENT[0], "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False False\n"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
