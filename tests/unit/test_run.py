"""`make test`: steps, their limits and what outlives them, a second look at what failed, the last lines."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from tests import run as runner
from tests.run import Outcome, Step, default_signals, run, run_steps, variables

SHELL = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"}


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runner, "LOGS", tmp_path)
    monkeypatch.setattr(runner.suites, "ROWS", ())
    return tmp_path


def a_step(script: str, seconds: float = 60, **more) -> Step:
    return Step("step", ("sh", "-c", script), seconds, **more)


def that_prints(*entries: dict) -> str:
    lines = "".join(json.dumps(entry) + r"\n" for entry in entries)
    return f"printf '{lines}' > $DISTTRAIN_TEST_RESULTS; exit 1"


def one(step: Step) -> Outcome:
    (outcome,) = run_steps([step], SHELL)
    return outcome


def test_a_step_has_a_log_its_failures_and_its_counts() -> None:
    entries = {"failed": "tests/x.py::test", "why": "call: no"}, {"counts": {"passed": 3}, "rows": ["x"]}
    outcome = one(a_step("echo words; " + that_prints(*entries)))
    assert (outcome.code, outcome.failed, outcome.counts) == (1, {"tests/x.py::test": "call: no"}, {"passed": 3})
    assert outcome.rows == {"x"}
    assert outcome.log.read_text() == "words\n"
    assert list(outcome.problems()) == []


def test_a_step_that_fails_without_a_test_that_does_is_a_problem() -> None:
    assert list(one(a_step("exit 4")).problems()) == ["ended with exit code 4"]


def test_a_step_that_dies_after_a_failure_is_a_problem_although_the_failed_test_passes_alone(capsys) -> None:
    dies = that_prints({"failed": PASSES, "why": "call: no"}).replace("exit 1", "kill -9 $$")
    assert run([[a_step(dies)]], SHELL, gate=True) == 1
    assert "step ended with exit code -9" in capsys.readouterr().out


def test_a_step_that_passes_its_limit_is_interrupted(logs: Path) -> None:
    outcome = one(a_step(f"trap 'touch {logs}/told; exit' INT; while true; do sleep 0.1; done", seconds=1))
    assert outcome.code is None
    assert list(outcome.problems()) == ["did not end within 1 s"]
    assert (logs / "told").exists()


def test_what_outlives_a_step_is_named_and_ended(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.1)
    outcome = one(a_step(f"setsid sleep 1234 & echo $! > {logs}/pid"))
    assert list(outcome.problems()) == ["left a process (sleep 1234) behind"]
    (left,) = (int(word) for word in (logs / "pid").read_text().split())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_mount_that_outlives_a_step_is_named_and_unmounted(logs: Path) -> None:
    outcome = one(a_step(f"mkdir $TMPDIR/m && mount -t tmpfs none $TMPDIR/m && echo $TMPDIR/m > {logs}/mount"))
    mount = (logs / "mount").read_text().strip()
    assert list(outcome.problems()) == [f"left a mount ({mount}) behind"]
    assert mount not in Path("/proc/self/mountinfo").read_text()


PASSES, FAILS = "tests/unit/test_run.py::test_the_shell_says_only_where_things_are", "tests/unit/none.py::test"
PASSES_TOO = "tests/unit/test_run.py::test_a_row_that_finds_no_test_is_red"


@pytest.mark.parametrize(("tests", "code"), [([PASSES], 0), ([FAILS], 1), ([PASSES, FAILS], 1), ([PASSES] * 6, 1)])
def test_a_few_tests_that_fail_are_run_once_more_alone(tests, code, capsys) -> None:
    entries = [{"failed": f"{test}{'?' * number}", "why": "call: no"} for number, test in enumerate(tests)]
    entries = entries if len(tests) > 5 else [{"failed": test, "why": "call: no"} for test in tests]
    assert run([[a_step(that_prints(*entries, {"counts": {}, "rows": []}))]], SHELL, gate=True) == code
    output = capsys.readouterr().out
    assert (f"flaky: {PASSES}" in output) == (PASSES in tests and len(tests) < 6)
    assert (f"FAILED {FAILS} - call: no" in output) == (FAILS in tests)
    assert output.splitlines()[-1].startswith("tests: ")


@pytest.mark.parametrize(("whens", "code"), [(["setup", "setup"], 0), (["call", "call"], 1)])
def test_tests_that_fail_with_the_fixture_they_share_are_run_once_more_together(whens, code, monkeypatch) -> None:
    monkeypatch.setattr(runner, "MOST_FAILURES_RUN_AGAIN", 1)
    tests = zip((PASSES, PASSES_TOO), whens, strict=True)
    entries = [{"failed": test, "why": f"{when}: no"} for test, when in tests]
    assert run([[a_step(that_prints(*entries, {"counts": {}, "rows": []}))]], SHELL, gate=True) == code


def test_the_complete_suite_has_no_second_look(capsys) -> None:
    step = a_step(that_prints({"failed": PASSES, "why": "call: no"}))
    assert run([[step]], SHELL, gate=False) == 1
    assert f"FAILED {PASSES}" in capsys.readouterr().out


@pytest.mark.parametrize(("gate", "code"), [(True, 2), (False, 0)])
def test_what_is_missing_is_reported_before_anything_runs(gate, code, logs, capsys) -> None:
    steps = [[a_step(f"touch {logs}/ran", needs=(lambda: "Go is missing",))]]
    assert run(steps, SHELL, gate=gate) == code
    assert capsys.readouterr().out.splitlines()[0] == ("Go is missing" if gate else "step is left out: Go is missing")
    assert not (logs / "ran").exists()


def test_a_row_that_finds_no_test_is_red(monkeypatch, capsys) -> None:
    monkeypatch.setattr(runner.suites, "ROWS", ("nobody",))
    assert run([[a_step("true")]], SHELL, gate=True) == 1
    assert "no test is called nobody" in capsys.readouterr().out


@pytest.mark.parametrize("left_out", [[], ["e2e"], ["lint", "browser"]])
def test_the_complete_suite_leaves_out_the_steps_that_are_named(left_out, monkeypatch) -> None:
    begun: list[str] = []

    def note(groups, shell, *, gate: bool) -> int:
        assert not gate
        begun.extend(step.name for steps in groups for step in steps)
        return 0

    monkeypatch.setattr(runner, "run", note)
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    every = {step.name for steps in runner.ALL for step in steps}
    assert runner.main(["--all", *(word for name in left_out for word in ("--without", name))], SHELL) == 0
    assert set(begun) == every - set(left_out)
    assert {"oldest-torch", "gpu-on-cpu"} <= set(begun)


@pytest.mark.parametrize(
    "arguments", [["--without", "e2e"], ["--all", "--without", "e2e", "tests/unit"], ["--all", "--without", "x"]]
)
def test_what_cannot_be_left_out_is_refused(arguments, monkeypatch, capsys) -> None:
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as refused:
        runner.main(arguments, SHELL)
    assert refused.value.code == 2
    assert "--without" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["tests/unit", "-k", "rules"], ["--all", "tests/e2e", "-x"]])
def test_arguments_are_pytests(arguments, monkeypatch) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    monkeypatch.setattr(runner.subprocess, "run", note)
    assert runner.main(arguments, SHELL) == 5
    assert commands == [[sys.executable, "-m", "pytest", *(word for word in arguments if word != "--all")]]


def test_the_oldest_torch_is_the_lower_bound_of_the_package() -> None:
    command = ["make", "-n", "-B", "setup-oldest"]
    output = subprocess.run(command, cwd=runner.ROOT, capture_output=True, text=True, check=True).stdout
    extras = tomllib.loads((runner.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = (one for one in extras["trainer"] if one.startswith("torch"))
    assert bound.replace(">=", "==") in output.split()


def test_the_shell_says_only_where_things_are() -> None:
    hostile = {"KUBECONFIG": "/nowhere", "LANG": "tr_TR", "TZ": "Asia/Tokyo", "PYTHONPATH": "/", "RANK": "3"}
    kept = variables(SHELL | hostile | {"GOPROXY": "direct"}, gate=True)
    assert kept["GOPROXY"] == "direct"
    assert kept.keys().isdisjoint(hostile)
    assert variables(SHELL | hostile, gate=False)["KUBECONFIG"] == "/nowhere"


def test_signals_that_the_shell_ignores_are_not_ignored_by_what_tests_start() -> None:
    script = (
        "import subprocess, tests.run; tests.run.default_signals();"
        "print(subprocess.run(['grep', 'SigIgn', '/proc/self/status'], capture_output=True, text=True).stdout)"
    )
    command = ["sh", "-c", f"trap '' HUP INT QUIT PIPE; exec {sys.executable} -c \"$0\"", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=runner.ROOT).stdout
    ignored = int(output.split()[1], 16)
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE)
    assert [number for number in numbers if ignored >> (number - 1) & 1] == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL, f"{default_signals.__name__} was called for this process"
