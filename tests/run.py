"""What `make test` and `make test-all` call: pytest in steps, each with a limit, a log and an environment of its own.

`python -m tests.run` is the gate: linters, then what is fast and certain (tests/suites.py says what that leaves out).
A test that fails there is run once more, alone, when all others have ended; if it passes then, it is named as flaky and
the gate is green. Tests that fail with a fixture that they share do so together. `python -m tests.run --all` is
everything, without a second run; `--all --without e2e` leaves out a step. With arguments of pytest, either is pytest
with these arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests import suites
from tests.needs import Need, api_server, browser, cluster, compiler
from tools.cluster import mounts

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "tests"
TRAINER = "tests/unit/trainer"
FAMILIES = " ".join(
    f"{TRAINER}/test_{name}.py"
    for name in (
        "transformers",
        "transformers_weights",
        "transformers_exports",
        "transformers_layouts",
        "transformers_experts",
        "transformers_expert_files",
        "chat_adapters",
    )
)
BESIDE = 2
"""So many steps of one group run beside each other."""
GRACE_SECONDS = 30.0
SOME_FAILED = 1
"""pytest's exit code where all tests ran and some failed."""
MOST_FAILURES_RUN_AGAIN = 5
"""Where more fail than these, it is the change."""
MOST_FAILURES_SHOWN = 30
MARK = "DISTTRAIN_TEST_STEP"
"""In the environment of all that a step starts."""


@dataclass(frozen=True)
class Step:
    """A command whose result counts."""

    name: str
    command: tuple[str, ...]
    seconds: float
    """Its limit: several times what it takes."""
    needs: tuple[Need, ...] = ()
    alone: str = ".venv/bin/python -m pytest 'ID'"
    """How to run one of its tests by itself."""


def pytest_step(name: str, *arguments: str, seconds: float, needs: tuple[Need, ...] = ()) -> Step:
    return Step(name, (sys.executable, "-m", "pytest", "--durations=100", *arguments), seconds, needs)


def folders(*names: str) -> list[str]:
    return [f"tests/unit/{name}" for name in names]


def oldest_step(name: str, tests: str, *, gate: bool) -> Step:
    """Tests with the oldest versions. Not `make test-oldest`: make's exit code is not pytest's."""
    chosen = "DISTTRAIN_TESTS=gate " if gate else ""
    pytest = f"{chosen}exec .venv-oldest/bin/python -m pytest --durations=100 {tests}"
    command = ("sh", "-c", f"make --silent setup-oldest && {pytest}")
    return Step(name, command, 3600, needs=(compiler,), alone="make test-oldest TESTS='ID'")


ON_CPU = "DISTTRAIN_GPU_TESTS_DEVICE=cpu"
OPERATOR = folders("agent", "api", "decide", "gate", "operator", "plan")
GATE = (
    (
        # Its ranks wait for each other, and leave half of the processors to the others.
        pytest_step("trainer", TRAINER, seconds=1800, needs=(compiler,)),
        Step("lint", ("make", "lint"), 300),
        pytest_step("operator", *OPERATOR, seconds=900),
        pytest_step("unit", "tests/unit", *(f"--ignore={name}" for name in (TRAINER, *OPERATOR)), seconds=900),
        pytest_step("local", "tests/local", seconds=900),
        # From cold, what they need is built meanwhile.
        pytest_step("integration", "tests/integration", seconds=1200, needs=(api_server,)),
    ),
)
ALL = (
    (
        pytest_step("trainer", TRAINER, "tests/gpu", seconds=5400, needs=(compiler,)),
        Step("lint", ("make", "lint"), 300),
        pytest_step("unit", "tests/unit", f"--ignore={TRAINER}", seconds=1800),
        # Beside what the trainer's step runs of them where there is a GPU: few machines have one, and they are to work
        # on that day.
        Step(
            "gpu-on-cpu",
            ("env", ON_CPU, *pytest_step("", "tests/gpu", seconds=0).command),
            1800,
            needs=(compiler,),
            alone=f"{ON_CPU} .venv/bin/python -m pytest 'ID'",
        ),
        # What machines with GPUs bring is older than what is pinned here.
        oldest_step("oldest-torch", f"{TRAINER} tests/unit/session", gate=True),
    ),
    (
        pytest_step("integration", "tests/integration", seconds=3600, needs=(api_server,)),
        pytest_step("local", "tests/local", seconds=3600),
        pytest_step("browser", "tests/browser", seconds=1800, needs=(browser, api_server)),
        # A family of models may be another one in an older version of transformers.
        oldest_step("oldest-models", FAMILIES, gate=False),
    ),
    # Has the machine for itself: a cluster is many processes, and some of their limits are Kubernetes' own.
    (pytest_step("e2e", "tests/e2e", seconds=3600, needs=(api_server, cluster)),),
)
Groups = Sequence[Sequence[Step]]


@dataclass
class Outcome:
    """What a step came to."""

    step: Step
    seconds: float
    code: int | None
    """None where its limit ended it."""
    failed: dict[str, str] = field(default_factory=dict)
    """Ids of tests, with a sentence."""
    counts: dict[str, int] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    """What outlived it, in words."""

    @property
    def log(self) -> Path:
        return LOGS / f"{self.step.name}.log"

    def problems(self) -> Iterator[str]:
        """What is wrong beside tests that failed."""
        if self.code is None:
            yield f"did not end within {self.step.seconds:.0f} s"
        elif self.code not in (0, SOME_FAILED) or (self.code and not self.failed):
            # Also where tests have failed: those after them may not have run.
            yield f"ended with exit code {self.code}"
        yield from (f"left {one} behind" for one in self.left)


class Running:
    """A step that runs."""

    def __init__(self, step: Step, variables: Mapping[str, str]) -> None:
        self.step, self._began = step, time.monotonic()
        self._mark = uuid.uuid4().hex
        self._results = LOGS / f"{step.name}.results"
        self._results.unlink(missing_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="disttrain-", ignore_cleanup_errors=True)
        environment = {
            **variables,
            MARK: self._mark,
            "DISTTRAIN_TEST_RESULTS": str(self._results),
            "TMPDIR": self._scratch.name,
        }
        with (LOGS / f"{step.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def outcome(self) -> Outcome | None:
        """None while it runs within its limit."""
        late = time.monotonic() - self._began > self.step.seconds
        if self._process.poll() is None and not late:
            return None
        if late:
            self.end()
        outcome = Outcome(self.step, time.monotonic() - self._began, None if late else self._process.returncode)
        if self._results.exists():
            for line in self._results.read_text().splitlines():
                entry = json.loads(line)
                if "failed" in entry:
                    outcome.failed[entry["failed"]] = entry["why"]
                else:
                    outcome.counts, outcome.rows = entry["counts"], set(entry["rows"])
        outcome.left = [f"a process ({command})" for command in self._end_what_is_left()]
        outcome.left += [f"a mount ({mount})" for mount in mounts.below(Path(self._scratch.name))]
        mounts.unmount_below(Path(self._scratch.name))
        self._scratch.cleanup()
        if Path(self._scratch.name).exists():
            outcome.left.append(f"files ({self._scratch.name})")
        return outcome

    def end(self) -> None:
        """As by Ctrl-C, for tests to end what they have started; then by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _end_what_is_left(self) -> Iterator[str]:
        """Command lines of processes that do not follow their step within the grace; they are killed."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := list(self._marked())) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())[:200] or process.name()
                process.kill()
                yield command
        psutil.wait_procs(left, GRACE_SECONDS)

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def run_steps(steps: Sequence[Step], variables: Mapping[str, str]) -> Iterator[Outcome]:
    """Runs steps of one group, two at a time, in their order."""
    waiting, running = list(steps), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < BESIDE:
                running.append(Running(waiting.pop(0), variables))
            time.sleep(0.1)
            for one in list(running):
                if (outcome := one.outcome()) is not None:
                    running.remove(one)
                    yield outcome
    finally:
        for one in running:
            one.end()


KEPT = ("PATH", "HOME", "USER", "LD_LIBRARY_PATH", "CI", "KUBEBUILDER_ASSETS", "NO_PROXY", "no_proxy")
KEPT_BEGINNINGS = ("GO", "XDG_", "PIP_", "SSL_", "HTTP", "http")


def variables(shell: Mapping[str, str], *, gate: bool) -> dict[str, str]:
    """The environment of tests: of the shell's only what says where programs and packages come from."""
    kept = {name: value for name, value in shell.items() if name in KEPT or name.startswith(KEPT_BEGINNINGS)}
    cache = Path(shell.get("XDG_CACHE_HOME") or Path(shell.get("HOME") or Path.home(), ".cache"))
    chosen = {
        "LC_ALL": "C.UTF-8",
        # Ranks fill the processors by themselves: threads that spin until the next is done take them away.
        "OMP_NUM_THREADS": "1",
    }
    # torch hands the path to g++ without quotes: with a blank in it, its own place below the temporary folder is taken.
    if not any(letter.isspace() for letter in str(cache)):
        chosen["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "disttrain" / "torchinductor")
    if gate:
        return kept | chosen | {"DISTTRAIN_TESTS": "gate", "PYTHONHASHSEED": "0"}
    rest = {name: shell[name] for name in ("KUBECONFIG", "DISTTRAIN_SOAK", "DISTTRAIN_SEED") if name in shell}
    return kept | chosen | rest


def default_signals() -> None:
    """Whoever starts the tests may ignore signals, as nohup does; what tests start would, too. Those that Python itself
    ignores, SIGPIPE and SIGXFSZ, `subprocess` gives back."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o022)


def run_again(outcomes: Iterable[Outcome], shell: Mapping[str, str]) -> set[str]:
    """Those of a few failed tests that pass alone."""
    groups = same_failures(outcomes)
    if not 0 < len(groups) <= MOST_FAILURES_RUN_AGAIN:
        return set()
    print(f"run once more, alone: {sum(map(len, groups))} tests", flush=True)
    passed = set[str]()
    for number, tests in enumerate(groups):
        (outcome,) = run_steps([pytest_step(f"again-{number}", *tests, seconds=300)], shell)
        if not list(outcome.problems()):
            passed |= tests - outcome.failed.keys()
    return passed


def same_failures(outcomes: Iterable[Outcome]) -> list[set[str]]:
    """Failed tests that share a failure: that of a fixture of their module."""
    found = dict[tuple[str, str], set[str]]()
    for test, why in (failure for outcome in outcomes for failure in outcome.failed.items()):
        shared = test.partition("::")[0] if why.startswith("setup: ") else test
        found.setdefault((shared, why), set()).add(test)
    return list(found.values())


def summary(outcomes: Sequence[Outcome], passed_alone: set[str], idle: Sequence[str]) -> Iterator[str]:
    """The last lines of a run: what failed, how to run it alone, what is flaky, and how many tests there were."""
    failed = [
        (outcome.step.alone, test, why)
        for outcome in outcomes
        for test, why in outcome.failed.items()
        if test not in passed_alone
    ]
    for alone in dict.fromkeys(way for way, _, _ in failed):
        lines = [f"FAILED {test} - {why}" for way, test, why in failed if way == alone]
        yield from lines[:MOST_FAILURES_SHOWN]
        if len(lines) > MOST_FAILURES_SHOWN:
            yield f"and {len(lines) - MOST_FAILURES_SHOWN} more"
        yield f"to run one alone: {alone}"
    for outcome in outcomes:
        for problem in outcome.problems():
            yield f"{outcome.step.name} {problem}: {outcome.log}"
    for row in idle:
        yield f"tests/suites.py: no test is called {row}"
    for test in sorted(passed_alone):
        yield f"flaky: {test}, which failed beside others and passed alone: mend it, or take it out of the gate"
    total = {kind: sum(outcome.counts.get(kind, 0) for outcome in outcomes) for kind in ("passed", "skipped")}
    yield f"tests: {total['passed'] + len(passed_alone)} passed, {len(failed)} failed, {total['skipped']} skipped"


def run(groups: Groups, shell: Mapping[str, str], *, gate: bool) -> int:
    """Runs the groups in turn. 0: all is well, 1: something is red."""
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = variables(shell, gate=gate)
    outcomes: list[Outcome] = []
    lacks = {step.name: lack for steps in groups for step in steps for need in step.needs if (lack := need())}
    for name, lack in lacks.items():
        print(f"{name} is left out: {lack}" if not gate else lack, flush=True)
    if gate and lacks:
        return 2
    print(f"logs are in {LOGS}", flush=True)
    for steps in groups:
        for outcome in run_steps([step for step in steps if step.name not in lacks], environment):
            outcomes.append(outcome)
            counts = ", ".join(f"{number} {kind}" for kind, number in outcome.counts.items() if number)
            state = counts or ("well" if outcome.code == 0 else "red")
            print(f"{outcome.step.name:12} {outcome.seconds:5.0f} s   {state}", flush=True)
    passed_alone = run_again(outcomes, environment) if gate else set()
    found = set[str]().union(*(outcome.rows for outcome in outcomes))
    idle = [row for row in suites.ROWS if row not in found] if gate else []
    for line in summary(outcomes, passed_alone, idle):
        print(line, flush=True)
    red = any(set(one.failed) - passed_alone or list(one.problems()) for one in outcomes)
    return int(red or bool(idle))


def main(arguments: Sequence[str], shell: Mapping[str, str]) -> int:
    default_signals()
    # What runs is ended before we are.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument(
        "--without", action="append", default=[], choices=[step.name for steps in ALL for step in steps]
    )
    options, chosen = parser.parse_known_args(arguments)
    if options.without and (chosen or not options.all):
        parser.error("--without NAME leaves a step out of `--all`, and takes no arguments of pytest beside it")
    if chosen:
        return subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=ROOT, check=False).returncode
    groups = [[step for step in steps if step.name not in options.without] for steps in (ALL if options.all else GATE)]
    return run(groups, shell, gate=not options.all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
