"""A job that is too large for this machine is refused, or asked about, before anything starts."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from disttrain.local.demand import FORKED
from disttrain_api.names import ExitCode

from .conftest import DISTTRAIN, Run, Workplace, own
from .test_outputs import Terminal, endless, shell, until_it_trains

SHORT = {"steps": 5, "microBatchSize": 16}
TRILLION = {**SHORT, "model": {"name": "mlp", "config": {"hiddenSizes": [1_000_000, 1_000_000]}}}
# One core for 17 pods: more than 16 each are asked about.
ONE_CORE = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
QUESTION = "17 ranks in 17 pods need 17 cores to run side by side (there are 1)"


def refused(run: Run, *numbers: str) -> None:
    assert run.exit_code == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("disttrain: the job does not fit this machine: ")
    assert line.endswith("or start it anyway with --yes")
    for number in numbers:
        assert number in line
    assert not (run.folder / "disttrain-runs").exists(), "nothing has begun"
    assert not run.stdout


def test_a_model_of_a_trillion_parameters_is_refused(workplace: Workplace) -> None:
    path = workplace.write(workers={"replicas": 2}, training=TRILLION)
    refused(workplace.run(path), "1,000,076,000,010 parameters", "at least 29.1 TiB of memory")


def test_who_insists_gets_the_sentence_of_the_trainer(workplace: Workplace) -> None:
    path = workplace.write(workers={"replicas": 2}, training=TRILLION)
    run = workplace.run(path, "--yes")
    assert run.exit_code == ExitCode.INVALID_CONFIGURATION
    assert run.stderr.startswith("disttrain: started although the job does not fit this machine: ")
    assert "1,000,076,000,010 parameters, for which the ranks of this pod (1) need at least 14.6 TiB" in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.left()


def seventeen(workplace: Workplace) -> Path:
    return own(workplace, "true", replicas=17)


@pytest.mark.parametrize(("answer", "starts"), [(b"y\n", True), (b"\n", False), (b"no\n", False), (b"\x04", False)])
def test_what_may_not_fit_is_asked_about_on_a_terminal(workplace: Workplace, answer: bytes, starts: bool) -> None:
    terminal = Terminal()
    run = terminal.start(workplace, [*ONE_CORE, *DISTTRAIN, "run", str(seventeen(workplace))])
    run.until(lambda: b"Start it? [y/N] " in terminal.screen, "the question")
    assert QUESTION.encode() in terminal.screen
    assert not (workplace.folder / "disttrain-runs").exists()
    terminal.type(answer)
    assert run.wait() == (0 if starts else 1)
    assert (workplace.folder / "disttrain-runs").exists() == starts
    assert (b"not started" in terminal.screen) == (not starts)


def test_a_low_limit_of_open_files_is_raised_where_it_may_be(workplace: Workplace) -> None:
    path = own(workplace, "sh", "-c", "until [ -e go ]; do sleep 0.2; done", replicas=80, runPolicy={"maxRestarts": 0})
    run = workplace.execute(shell(f"ulimit -Sn 64; exec $RUN --yes {path}"))
    run.until(lambda: len(list(run.folder.glob("disttrain-runs/*/logs/*.log"))) == 80, "all pods run side by side")
    (workplace.folder / "go").touch()
    assert run.wait() == 0, run.stderr


def test_a_bare_pod_needs_no_less_than_what_is_counted(workplace: Workplace) -> None:
    run = workplace.start(endless(workplace))
    until_it_trains(run)
    found: dict[str, list[psutil.Process]] = {}
    for process in run.below():
        found.setdefault(process.name().partition(" ")[0], []).append(process)
    assert {name: len(found[name]) for name in ("keeper", "agent", "rank")} == {"keeper": 2, "agent": 2, "rank": 2}

    def least(*names: str) -> int:
        """Bytes that are its own, of the smallest of each."""
        return sum(min(process.memory_full_info().uss for process in found[name]) for name in names)

    assert least("rank") >= FORKED.rank
    assert least("keeper", "agent") >= FORKED.pod
    tasks: Any = [process.num_threads() for process in found["rank"]]
    assert min(tasks) >= FORKED.rank_tasks
    (server,) = (p for name, processes in found.items() if name not in ("keeper", "agent", "rank") for p in processes)
    assert server.memory_full_info().rss >= FORKED.once
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
