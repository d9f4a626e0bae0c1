"""`disttrain.session` as processes: killed, stopped and resumed, a run ends as if nothing had happened."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_api.names import ExitCode
from disttrain_api.report import PodReport, decode_pod_report
from tests.unit.trainer.worlds import Ended, run_ranks

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
