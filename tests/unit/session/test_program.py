"""The agent of a program that does not report: its output and its end are as without it, and its progress is known."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from disttrain_api.agent_token import agent_token
from disttrain_api.names import TOKEN_HEADER, Env
from disttrain_api.report import AgentStatus, RankReport, decode_pod_report
from tests.waiting import GENEROUS, until
from tools.cluster.ports import free_port

RULES = [{"pattern": r"iter (?P<step>\d+): loss (?P<loss>\S+)"}]
ODD = b"iter 1: loss 2.0\r\x1b[31m 10%\xff\xfe\r\n\n" + b"x" * 100_000 + b"\niter 2: loss 1.5\nno end"
READER = [sys.executable, "-P", "-m", "disttrain_session.program"]


def environment(folder: Path, *rules: dict[str, str], **more: str) -> dict[str, str]:
    """What the operator sets on the first worker of a job with `progress`."""
    return os.environ | {
        "DISTTRAIN_JOB_UID": "uid-1",
        "DISTTRAIN_ROLE": "worker",
        "DISTTRAIN_SCRATCH": str(folder),
        "DISTTRAIN_TERMINATION_LOG": str(folder / "termination-log"),
        "DISTTRAIN_ATTEMPT": "2",
        "NODE_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        Env.PROGRESS: json.dumps({"totalSteps": 9, "logRules": list(rules or RULES)}),
        **more,
    }


def program(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\n{text}"]


def run(folder: Path, command: list[str], *rules: dict[str, str]) -> "subprocess.CompletedProcess[bytes]":
    whole = [*READER, *command]
    return subprocess.run(whole, env=environment(folder, *rules), capture_output=True, check=False, timeout=GENEROUS)


@contextmanager
def started(folder: Path, text: str, **more: str) -> "Iterator[subprocess.Popen[bytes]]":
    """The program, which prints a line once it is ready. Nothing of it outlives the test."""
    process = subprocess.Popen([*READER, *program(text)], env=environment(folder, **more), stdout=subprocess.PIPE)
    try:
        assert lines(process).readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(process: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def reported(folder: Path) -> RankReport | None:
    path = folder / "reports" / "rank-0.json"
    return RankReport.model_validate_json(path.read_text()) if path.exists() else None


def left(folder: Path) -> RankReport | None:
    path = folder / "termination-log"
    found = decode_pod_report(path.read_text()) if path.exists() else None
    return found.progress if found is not None else None


def test_both_streams_pass_through_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(ODD)
    odd = f"odd = open({str(tmp_path / 'odd')!r}, 'rb').read()"
    done = run(tmp_path, program(f"{odd}; sys.stdout.buffer.write(odd); sys.stderr.buffer.write(odd[::-1])"))
    assert (done.returncode, done.stdout, done.stderr) == (0, ODD, ODD[::-1])
    report = reported(tmp_path)
    assert (report.step, report.total_steps, report.loss) == (2, 9, 1.5)
    assert left(tmp_path) == report, "a program that has succeeded leaves its progress"


def test_ten_megabytes_without_an_end_passes_through(tmp_path: Path) -> None:
    done = run(tmp_path, program("os.write(1, b'iter 3: loss 1 ') and [os.write(1, b'x' * 65536) for _ in range(160)]"))
    assert len(done.stdout) == len("iter 3: loss 1 ") + 160 * 65536
    report = reported(tmp_path)
    assert report.step == 3


@pytest.mark.parametrize(
    ("text", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os.abort()", 134)]
)
def test_a_program_that_fails_is_judged_by_its_log_as_ever(tmp_path: Path, text: str, code: int) -> None:
    done = run(tmp_path, program(f"print('iter 1: loss 2', flush=True); {text}"))
    assert (done.returncode, done.stdout) == (code, b"iter 1: loss 2\n")
    assert reported(tmp_path) is not None
    assert left(tmp_path) is None, "a message would take the place of the log's end"


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("/", 126)])
def test_a_program_that_cannot_be_started_says_so(tmp_path: Path, name: str, code: int) -> None:
    done = run(tmp_path, [name])
    assert done.returncode == code
    assert done.stderr.startswith(f"cannot start {name}: ".encode())


def test_a_program_that_reports_as_well_starts_no_agent_of_its_own(tmp_path: Path) -> None:
    text = program(f"sys.exit({Env.AGENT_PORT!r} in os.environ)")
    whole = [*READER, *text]
    given = environment(tmp_path, **{Env.AGENT_PORT: "1"})
    assert subprocess.run(whole, env=given, check=False, timeout=GENEROUS).returncode == 0


def test_signals_reach_the_program(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(1000)"
    with started(tmp_path, text) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(GENEROUS) == 5


def test_a_process_that_is_left_behind_holds_nothing_up(tmp_path: Path) -> None:
    """It has the program's output open."""
    text = "pid = os.fork()\nif pid == 0: os.setsid(); time.sleep(1000)\nprint(pid, flush=True)"
    done = subprocess.Popen([*READER, *program(text)], env=environment(tmp_path), stdout=subprocess.PIPE)
    left_behind = int(lines(done).readline())
    try:
        assert done.wait(GENEROUS) == 0
    finally:
        os.kill(left_behind, signal.SIGKILL)


def test_what_is_still_in_the_pipe_when_the_program_has_ended_is_passed_on(tmp_path: Path) -> None:
    """More than one read takes: the agent is held until the program has written all and ended."""
    text = f"""
import fcntl
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
print(os.getpid(), flush=True)
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.01)
os.write(1, b"x" * 800_000 + b"\\niter 9: loss 1")
"""
    process = subprocess.Popen([*READER, *program(text)], env=environment(tmp_path), stdout=subprocess.PIPE)
    try:
        child = psutil.Process(int(lines(process).readline()))
        process.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        until(lambda: child.status() == psutil.STATUS_ZOMBIE, "the program has ended")
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=GENEROUS)[0] == b"x" * 800_000 + b"\niter 9: loss 1"
        report = reported(tmp_path)
        assert report.step == 9
    finally:
        process.kill()


def test_a_rule_that_cannot_be_used_costs_no_training(tmp_path: Path) -> None:
    done = run(tmp_path, program("print('iter 1: loss 2')"), {"pattern": "[a"}, *RULES)
    assert done.returncode == 0
    assert b"`[a` is left out: missing ]" in done.stdout
    assert reported(tmp_path) is not None


def test_the_operator_learns_the_progress_of_a_program_that_runs(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token")
    port = free_port()
    more = {Env.AGENT_PORT: str(port), Env.PET_MASTER_ADDR: "127.0.0.1", Env.TOKEN: str(tmp_path / "token")}

    def asked(path: str) -> Any:
        headers = {TOKEN_HEADER: agent_token("a-token")}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=GENEROUS) as answer:
            return json.loads(answer.read())

    def status() -> AgentStatus:
        return AgentStatus.model_validate(asked("/v1/status"))

    with started(tmp_path, "print('iter 4: loss 2.5', flush=True); time.sleep(1000)", **more):
        until(lambda: status().ranks[0].report is not None, "the line is read")
        found = status()
        (rank,) = found.ranks
        assert (found.job_uid, found.attempt, rank.exit_code) == ("uid-1", 2, None)
        assert (rank.report.step, rank.report.total_steps, rank.report.loss) == (4, 9, 2.5)
        assert (rank.report.phase, rank.seconds_since_step is not None) == (None, True), "it may hang from here on"
        assert asked("/v1/logs?rank=0&tail=5") == {"rank": 0, "lines": ["iter 4: loss 2.5"]}
