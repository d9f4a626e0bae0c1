"""Saves in the background: training goes on, the content is that of the step, and every end waits for them."""

import shutil
import signal

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from disttrain_api.names import ExitCode
from disttrain_trainer.checkpoint.fence import Fence
from disttrain_trainer.checkpoint.storage import StepFolders
from tests.unit.trainer.test_checkpoint import run
from tests.unit.trainer.worlds import job, launch, small, user

GATED = "tests.unit.trainer.gated_writer"
TRAINING = small(
    steps=6, model=user("wide_mlp"), optimizer={"name": "AdamW"}, checkpoint={"interval": 3}, logging={"interval": 1}
)
IN_TURN = {"interval": 3, "asynchronous": False}


def content(step_folder):
    """All of a checkpoint, flat."""
    target = step_folder.with_suffix(".pt")
    dcp_to_torch_save(step_folder, target)
    return dict(_flat("", torch.load(target, weights_only=False)))


def _flat(path, value):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{path}/{name}", inner)
    elif isinstance(value, tuple | list):
        for number, inner in enumerate(value):
            yield from _flat(f"{path}/{number}", inner)
    else:
        yield path, value


def different(own, theirs):
    """Names of what is not bit for bit the same."""
    assert own.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not _same(own[name], value)]


def _same(one, other):
    if isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """Checkpoints of two ranks whose training waited for each."""
    storage = tmp_path_factory.mktemp("in-turn")
    ranks = run(storage / "run", {**TRAINING, "checkpoint": IN_TURN}, storage, ranks=2)
    assert [rank.code for rank in ranks] == [ExitCode.DONE] * 2
    return storage / "test"


class TestContent:
    @pytest.fixture(scope="class")
    @classmethod
    def behind(cls, tmp_path_factory):
        """Checkpoints of a run that had done two more steps before the first byte was written."""
        storage = tmp_path_factory.mktemp("behind")
        with launch(storage / "run", job(TRAINING), ranks=2, storage=storage, module=GATED, GATE=str(storage)) as world:
            world.wait_until(lambda: world.reached(5, rank=0) and world.reached(5, rank=1))
            assert StepFolders(storage / "test").complete() == []
            assert (storage / "test" / "step-3.partial-1").is_dir()
            assert world.report(0).checkpoint is None
            (storage / "go").touch()
            assert [rank.code for rank in world.ended()] == [ExitCode.DONE] * 2
            assert world.report(1).checkpoint.step == 6
        return storage / "test"

    @pytest.mark.parametrize("step", [3, 6])
    def test_is_that_of_the_step_and_not_later(self, behind, in_turn, step):
        assert StepFolders(behind).complete() == [3, 6]
        assert different(content(behind / f"step-{step}"), content(in_turn / f"step-{step}")) == []

    def test_going_on_from_it_equals_the_run_that_never_stopped(self, behind, in_turn, tmp_path):
        shutil.copytree(behind / "step-3", tmp_path / "test" / "step-3")
        ranks = run(tmp_path / "run", TRAINING, tmp_path, ranks=2, attempt=2)
        assert "resuming after step 3" in ranks[0].out
        assert different(content(tmp_path / "test" / "step-6"), content(in_turn / "step-6")) == []


class TestEnds:
    def test_sigterm_waits_for_it_and_saves_once_more(self, tmp_path):
        training = {**TRAINING, "steps": 100_000, "data": user("slow_samples"), "checkpoint": {"interval": 4}}
        with launch(
            tmp_path / "run", job(training), ranks=2, storage=tmp_path, module=GATED, GATE=str(tmp_path)
        ) as world:
            world.wait_until(lambda: world.reached(5))
            world.processes[1].send_signal(signal.SIGTERM)
            (tmp_path / "go").touch()
            stopped = world.ended()
        assert [rank.code for rank in stopped] == [ExitCode.STOPPED] * 2
        assert len({rank.report.error.message for rank in stopped}) == 1, "after the same step"
        last = stopped[0].report.checkpoint.step
        assert last > 4
        complete = StepFolders(tmp_path / "test").complete()
        assert (complete[0], complete[-1]) == (4, last)

    def test_a_loss_that_is_not_finite_waits_for_it(self, tmp_path):
        training = small(
            steps=100_000, data=user("poisoned_samples", folder=str(tmp_path)), checkpoint={"interval": 500},
            logging={"interval": 1},
        )  # fmt: skip
        with launch(tmp_path / "run", job(training), storage=tmp_path, module=GATED, GATE=str(tmp_path)) as world:
            world.wait_until(lambda: world.reached(501))
            (tmp_path / "poison").touch()
            (rank,) = world.ended()
        assert rank.code == ExitCode.NON_FINITE_LOSS
        assert StepFolders(tmp_path / "test").complete() == [500]
        assert rank.report.checkpoint.step == 500

    def test_a_failed_one_ends_the_job_before_the_next_is_due(self, tmp_path):
        training = small(steps=100_000, checkpoint={"interval": 1500}, logging={"interval": 1})
        with launch(tmp_path / "run", job(training), storage=tmp_path, module=GATED, GATE=str(tmp_path)) as world:
            world.wait_until(lambda: world.reached(1501))
            Fence(tmp_path / "test", "uid-1", 2).take()
            (tmp_path / "go").touch()
            (rank,) = world.ended()
        assert rank.code == ExitCode.FENCED
        assert rank.report.step < 3000
        assert rank.report.checkpoint is None
        assert StepFolders(tmp_path / "test").complete() == []
