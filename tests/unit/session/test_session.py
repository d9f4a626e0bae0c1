"""`disttrain.session` as processes: killed, stopped and resumed, a run ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_api.names import ExitCode
from disttrain_api.report import PodReport, decode_pod_report
from tests.unit.trainer.worlds import Ended, run_ranks
from tests.waiting import GENEROUS, until

from .looping import STEPS

SHARDED = '{"dataParallelShardDegree": 2}'
KILLED = -signal.SIGKILL


class Job:
    """A job with a command of its own, whose attempts share a storage."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self._environment, self._attempts = folder, environment, 0
        self.storage = folder / "storage"

    def attempt(self, ranks: int, **environment: str) -> list[Ended]:
        """Run an attempt to its end."""
        self._attempts += 1
        self.pod = self.folder / f"pod-{self._attempts}"
        self.pod.mkdir(parents=True)
        given = {
            "DISTTRAIN_CONFIG": "",
            "DISTTRAIN_JOB_UID": "3f9a1c02-0000",
            "DISTTRAIN_JOB_NAME": "loop",
            "DISTTRAIN_SCRATCH": str(self.pod),
            "DISTTRAIN_TERMINATION_LOG": str(self.pod / "termination-log"),
            "NODE_RANK": "0",
            "LOOP_OUT": str(self.pod),
        }
        options: dict[str, Any] = {**given, **self._environment, **environment}
        module = "tests.unit.session.looping"
        return run_ranks(self.pod, None, ranks, storage=self.storage, attempt=self._attempts, module=module, **options)

    def message(self) -> PodReport:
        """The termination message of the last attempt's pod."""
        found = decode_pod_report((self.pod / "termination-log").read_text())
        assert found is not None
        return found

    def results(self, ranks: int) -> list[dict[str, Any]]:
        """What the ranks of the last attempt have become."""
        return [torch.load(self.pod / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def codes(ended: Sequence[Ended]) -> list[int]:
    return [rank.code for rank in ended]


def stderr_of(ended: Sequence[Ended]) -> str:
    return "\n".join(rank.err for rank in ended)


@pytest.mark.parametrize("layout", ["", SHARDED], ids=["replicated", "sharded"])
def test_a_run_that_was_killed_and_stopped_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path, layout: str) -> None:
    whole, broken = (Job(tmp_path / name, DISTTRAIN_PARALLELISM=layout) for name in ("whole", "broken"))
    ended = whole.attempt(2)
    assert codes(ended) == [0, 0], stderr_of(ended)
    assert whole.message().progress.done

    # Killed after step 4: rank 1, whose peer loses it. The checkpoint of step 3 is known to the operator.
    killed = broken.attempt(2, LOOP_END="1 SIGKILL 4")
    assert codes(killed) == [ExitCode.PEER_LOST, KILLED], stderr_of(killed)
    report = broken.message()
    assert report.failure.exit_code == ExitCode.PEER_LOST
    assert report.progress.checkpoint.step == 3

    # SIGTERM at one rank: both stop after the same step, with a checkpoint.
    stopped = broken.attempt(2, LOOP_END="1 SIGTERM 5")
    assert codes(stopped) == [ExitCode.STOPPED] * 2, stderr_of(stopped)
    assert "resuming after step 3" in stopped[0].out
    progress = broken.message().progress
    assert 5 <= progress.checkpoint.step == progress.step < STEPS

    last = broken.attempt(2)
    assert codes(last) == [0, 0], stderr_of(last)
    assert f"resuming after step {progress.step}" in last[0].out
    folders = sorted(path.name for path in (broken.storage / "loop-3f9a1").glob("step-*"))
    assert folders[-1] == f"step-{STEPS}"
    assert len(folders) == 2, "keep_latest"
    for expected, found in zip(whole.results(2), broken.results(2), strict=True):
        assert found["walk"] == expected["walk"]
        assert found["calls"] == expected["calls"]
        assert found["rate"] == expected["rate"]
        assert torch.equal(found["next"], expected["next"])
        assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
        assert all(torch.equal(one, other) for one, other in zip(found["moments"], expected["moments"], strict=True))
    first, second = whole.results(2)
    assert first["walk"] != second["walk"], "each rank has random numbers of its own"


def test_a_bare_script_resumes_and_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    # No job: nothing but the script, alone in the world.
    bare = dict.fromkeys(("DISTTRAIN_JOB_UID", "DISTTRAIN_JOB_NAME", "DISTTRAIN_SCRATCH", "DISTTRAIN_STORAGE"), "")
    bare |= dict.fromkeys(("WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "")
    script = Job(tmp_path / "bare", **bare, LOOP_STORAGE=str(tmp_path / "kept"))
    killed = script.attempt(1, LOOP_END="0 SIGKILL 4")
    assert codes(killed) == [KILLED], stderr_of(killed)
    ended = script.attempt(1)
    assert codes(ended) == [0], stderr_of(ended)
    assert "resuming after step 3" in ended[0].out
    assert not (script.pod / "reports").exists(), "there is no job that a report is for"
    lines = (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()
    assert f'"step": {STEPS}' in lines[-1]

    two = Job(tmp_path / "two", LOOP_STORAGE=str(tmp_path / "kept")).attempt(2)
    assert codes(two) == [ExitCode.CHECKPOINT_MISMATCH] * 2, stderr_of(two)
    assert "was written by 1 ranks, here are 2" in two[0].err

    other = Job(tmp_path / "other", LOOP_STORAGE=str(tmp_path / "kept"), LOOP_EXTRA="1")
    refused = other.attempt(1)
    assert codes(refused) == [ExitCode.CHECKPOINT_MISMATCH], stderr_of(refused)
    assert "nothing is not registered here, object extra is not in it" in refused[0].err
    failure = other.message().failure
    assert (failure.exit_code, failure.reason) == (ExitCode.CHECKPOINT_MISMATCH, "CheckpointMismatch")


def test_a_layout_that_a_session_cannot_have_is_refused_by_its_name(tmp_path: Path) -> None:
    job = Job(tmp_path, DISTTRAIN_PARALLELISM='{"dataParallel": {"mode": "LocalSGD"}}')
    ended = job.attempt(1)
    assert codes(ended) == [ExitCode.INVALID_CONFIGURATION], stderr_of(ended)
    assert "`parallelism.dataParallel.mode` is of the trainer's own loop" in ended[0].err


HELD = """
import pathlib, sys, time
import torch
import disttrain

with disttrain.session(steps=8, checkpoint_interval=3) as session:
    model, optimizer = session.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    session.restore(model=model, optimizer=optimizer)
    while not session.finished:
        session.step(loss=0.0)
        if session.completed == 4 and len(sys.argv) > 1:
            pathlib.Path("held").touch()
            while not pathlib.Path(sys.argv[1]).exists():
                time.sleep(0.01)
"""


def test_a_former_generation_of_the_same_attempt_writes_no_checkpoint_once_the_next_one_has_begun(
    tmp_path: Path,
) -> None:
    """As where a pod is cut off with its node, and another one has taken its place in the attempt."""
    given = {
        "DISTTRAIN_JOB_UID": "3f9a1c02-0000",
        "DISTTRAIN_JOB_NAME": "loop",
        "DISTTRAIN_SCRATCH": str(tmp_path),
        "DISTTRAIN_TERMINATION_LOG": str(tmp_path / "termination-log"),
        "DISTTRAIN_STORAGE": str(tmp_path / "storage"),
        "DISTTRAIN_ATTEMPT": "1",
    }

    def start(generation: int, *words: str) -> "subprocess.Popen[str]":
        environment = os.environ | given | {"DISTTRAIN_GENERATION": str(generation)}
        command = [sys.executable, "-c", HELD, *words]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    def checkpoints() -> set[str]:
        return {path.name for path in (tmp_path / "storage" / "loop-3f9a1").glob("step-?")}

    former = start(0, "go")
    try:
        until((tmp_path / "held").exists, "the former generation is between two checkpoints")
        with start(1) as current:
            assert current.wait(GENEROUS) == 0
        kept = checkpoints()
        (tmp_path / "go").touch()
        _, said = former.communicate(timeout=GENEROUS)
    finally:
        former.kill()
        former.communicate()
    assert former.returncode == ExitCode.FENCED, said
    assert "belongs to another process of attempt 1, which has begun later" in said
    assert checkpoints() == kept
    assert not (tmp_path / "termination-log").exists(), "the agent writes the message of the pod"
    lines = map(json.loads, (tmp_path / "storage" / "loop-3f9a1" / "metrics.jsonl").read_text().splitlines())
    assert (1, 1) in [(line["attempt"], line.get("generation")) for line in lines if line["step"] == STEPS]
