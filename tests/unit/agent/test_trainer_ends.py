"""The agent with the trainer as its ranks: a rank has succeeded when it reports that its work is done, not before."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disttrain_api.names import Env, ExitCode
from tests.unit.trainer.worlds import job, small
from tools.cluster.ports import free_port

from .conftest import Pod

# Ranks import torch, on a machine that may do other things.
PATIENT = 240.0


def ending(how: str, rank: int, steps: int = 20, **config: Any) -> dict[str, Any]:
    """A training whose data end a rank in one of its steps."""
    data = {
        "entrypoint": "tests.unit.trainer.ending_code:ending_samples",
        "config": {"how": how, "rank": rank, **config},
    }
    return small(steps=steps, data=data, logging={"interval": 1})


class Gang:
    """Pods of a job, each an agent with the trainer."""

    def __init__(self, folder: Path, pods: int, ranks: int) -> None:
        shared = {
            Env.WORLD_SIZE: str(pods * ranks),
            Env.LOCAL_WORLD_SIZE: str(ranks),
            Env.MASTER_PORT: str(free_port()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.pods = [
            Pod(folder / f"pod-{index}", ranks, changes={**shared, Env.NODE_RANK: str(index)}) for index in range(pods)
        ]

    def run(self, training: dict[str, Any]) -> list[int]:
        for pod in self.pods:
            pod.folder.mkdir()
            (pod.folder / "job.json").write_text(json.dumps(job(training)))
            pod.start_command([])
        return [pod.wait(PATIENT) for pod in self.pods]


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(pods: int, ranks: int) -> Gang:
            gang = Gang(tmp_path, pods, ranks)
            for pod in gang.pods:
                stack.callback(pod.end)
            return gang

        yield make


@pytest.mark.parametrize(
    ("how", "words", "pods", "ranks"),
    [("exit", "called sys.exit", 1, 2), ("leave", "ended the process", 2, 1)],
    ids=["sys.exit, one pod", "os._exit, two pods"],
)
def test_a_rank_that_leaves_early_is_blamed_not_the_peer_that_lost_it(gangs, how, words, pods, ranks):
    """Red where exit code 0 is a success without a report that the work is done."""
    gang = gangs(pods, ranks)
    codes = gang.run(ending(how, rank=1))
    left = gang.pods[-1]
    assert codes[-1] == ExitCode.LEFT_EARLY, left.log
    if pods == 2:
        assert codes[0] == ExitCode.PEER_LOST, gang.pods[0].log
    failure = left.failure
    assert (failure.rank, failure.exit_code, failure.reason) == (1, ExitCode.LEFT_EARLY, "LeftEarly")
    # The next batch is loaded before the step is complete.
    assert failure.message.startswith("left at step 8 of 20 with exit code 0 before its work was done; ")
    assert words in failure.message
    if how == "exit":
        assert "ending_code.py:" in failure.message
        assert (failure.signature.error, failure.signature.step) == ("SystemExit", 8)


def test_a_rank_that_is_done_has_succeeded_however_its_process_ends(gangs: Any) -> None:
    gang = gangs(1, 1)
    assert gang.run(ending("exit", rank=0, after=9, steps=6)) == [0]
    assert gang.pods[0].report.failure is None
    assert gang.pods[0].progress.done
