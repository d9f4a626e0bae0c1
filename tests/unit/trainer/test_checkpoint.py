"""Checkpoints in real processes: SIGTERM, SIGKILL, full disks, fences, other models."""

import json
import os
import signal
import subprocess
from contextlib import suppress

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from disttrain_api.names import ExitCode
from disttrain_trainer.errors import Fenced
from disttrain_trainer.fence import Fence, Owner
from disttrain_trainer.storage import StepFolders
from tests.unit.trainer.worlds import job, launch, run_cases, small, user

EVERY_TWO = {"checkpoint": {"interval": 2, "keepLatest": 2}, "logging": {"interval": 1}}


def model_at(storage, step):
    """Parameters of a complete checkpoint, by torch's own converter."""
    target = storage / f"step-{step}.pt"
    dcp_to_torch_save(storage / "test" / f"step-{step}", target)
    return torch.load(target, weights_only=False)["model"]


def run(folder, training, storage, **options):
    with launch(folder, job(training), storage=storage, **options) as world:
        return world.ended()


class TestSigterm:
    @pytest.fixture(scope="class")
    @classmethod
    def storages(cls, tmp_path_factory):
        """One run that is stopped by a signal to one rank and started again, one that is left alone."""
        folder = tmp_path_factory.mktemp("sigterm")
        training = small(steps=40, model=user("wide_mlp"), data=user("slow_samples"), logging={"interval": 1})
        with launch(folder / "stopped", job(training), ranks=2, storage=folder / "a") as world:
            world.wait_until(lambda: world.reached(3))
            world.processes[1].send_signal(signal.SIGTERM)
            stopped = world.ended()
        resumed = run(folder / "resumed", training, folder / "a", ranks=2, attempt=2)
        through = run(folder / "through", training, folder / "b", ranks=2)
        return folder, stopped, resumed, through

    def test_all_ranks_stop_after_the_same_step(self, storages):
        _, stopped, _, _ = storages
        assert [rank.code for rank in stopped] == [ExitCode.STOPPED] * 2
        assert len({rank.report.error.message for rank in stopped}) == 1
        assert stopped[0].report.error.reason == "Stopped"
        assert stopped[0].report.checkpoint.step == stopped[0].report.step < 40

    def test_the_next_attempt_goes_on_from_there(self, storages):
        _, stopped, resumed, _ = storages
        assert [rank.code for rank in resumed] == [ExitCode.DONE] * 2
        assert f"resuming after step {stopped[0].report.step}" in resumed[0].out

    def test_and_ends_where_the_other_run_ends(self, storages):
        folder, _, _, through = storages
        assert through[0].code == ExitCode.DONE
        ours, theirs = model_at(folder / "a", 40), model_at(folder / "b", 40)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def test_before_the_first_step_a_rank_exits_at_once(self, tmp_path):
        with launch(tmp_path, job(small(data=user("waiting_samples", folder=str(tmp_path))))) as world:
            world.wait_until((tmp_path / "called").exists)
            world.processes[0].send_signal(signal.SIGTERM)
            (rank,) = world.ended()
        assert rank.code == ExitCode.STOPPED
        assert rank.report.error.message == "SIGTERM came before the first step"


class TestKilledWhileSaving:
    def test_the_previous_checkpoint_survives(self, tmp_path):
        """A model of 30 MB, so that a save takes long enough to be hit."""
        training = small(
            steps=8, model={"name": "mlp", "config": {"hiddenSizes": [1500, 1500], "inputSize": 6, "outputSize": 5}},
            data=user("float_samples"), optimizer={"name": "AdamW"}, **EVERY_TWO,
        )  # fmt: skip
        storage = tmp_path / "storage"
        with launch(tmp_path / "first", job(training), ranks=2, storage=storage) as world:
            world.wait_until((storage / "test" / "step-4.partial-1").exists)
            world.processes[1].send_signal(signal.SIGKILL)
            killed = world.ended()
        assert killed[0].code in (ExitCode.PEER_LOST, 1)
        assert StepFolders(storage / "test").complete()[0] == 2
        resumed = run(tmp_path / "second", training, storage, ranks=2, attempt=2)
        assert [rank.code for rank in resumed] == [ExitCode.DONE] * 2
        assert "resuming after step" in resumed[0].out
        assert StepFolders(storage / "test").complete() == [6, 8]
        assert not list((storage / "test").glob("*.partial-*"))


class TestFullStorage:
    TRAINING = small(
        steps=6,
        model=user("wide_mlp"),
        optimizer={"name": "AdamW"},
        checkpoint={"interval": 1, "keepLatest": 6},
        logging={"interval": 1},
    )

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
    def test_a_full_file_system_ends_the_job_and_keeps_what_is_there(self, tmp_path):
        storage = tmp_path / "small"
        storage.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", storage], check=False)
        if mounted.returncode:
            pytest.skip("this sandbox forbids mounts")
        try:
            full = run(tmp_path / "first", self.TRAINING, storage, ranks=2)
            assert [rank.code for rank in full] == [ExitCode.STORAGE_FULL] * 2, full[0].err
            assert "storage.size" in full[0].report.error.message
            # Each checkpoint has 13 MB.
            assert StepFolders(storage / "test").complete() == [1, 2]
            assert not list((storage / "test").glob("*.partial-*"))
            with suppress(OSError), (storage / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    continue
            brimful = run(tmp_path / "again", self.TRAINING, storage, ranks=2, attempt=2)
            assert [rank.code for rank in brimful] == [ExitCode.STORAGE_FULL] * 2, brimful[0].err
            subprocess.run(["mount", "-o", "remount,size=128m", storage], check=True)
            resumed = run(tmp_path / "second", self.TRAINING, storage, ranks=2, attempt=3)
            assert [rank.code for rank in resumed] == [ExitCode.DONE] * 2
            assert "resuming after step 2" in resumed[0].out
        finally:
            subprocess.run(["umount", storage], check=True)

    def test_a_limit_on_the_size_of_files_counts_as_full(self, tmp_path):
        (full,) = run(tmp_path / "run", self.TRAINING, tmp_path / "storage", file_size_limit=2**20)
        assert full.code == ExitCode.STORAGE_FULL, full.err
        assert StepFolders(tmp_path / "storage" / "test").complete() == []


class TestAnotherModel:
    @pytest.fixture(scope="class")
    @classmethod
    def errors(cls, tmp_path_factory):
        first = {"training": small(steps=2)}

        def then(**changes):
            return [first, {"training": small(steps=4, **changes)}]

        cases = {
            "wider": then(model=user("double_mlp", hidden=17)),
            "deeper": then(model=user("double_mlp", depth=3)),
            "shallower": then(model=user("double_mlp", depth=1)),
            "other optimizer": then(optimizer={"name": "AdamW"}),
            "the same": then(),
        }
        results = run_cases(tmp_path_factory.mktemp("mismatch"), 1, cases)
        return {name: result["errors"][-1] for name, result in results.items()}

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("wider", ["CheckpointMismatch", "step-2", "`0.weight`", "[16, 6]", "[17, 6]"]),
            ("deeper", ["CheckpointMismatch", "step-2", "`4.weight`"]),
            ("shallower", ["CheckpointMismatch", "step-2", "`2.weight`"]),
            ("other optimizer", ["CheckpointMismatch", "another optimizer", "`0.weight`"]),
        ],
    )
    def test_is_refused_by_name(self, errors, name, parts):
        for part in parts:
            assert part in errors[name]

    def test_the_same_model_goes_on(self, errors):
        assert errors["the same"] is None

    def test_exit_code(self, tmp_path):
        run(tmp_path / "first", small(steps=2), tmp_path / "storage")
        wider = small(steps=4, model=user("double_mlp", hidden=17))
        (rank,) = run(tmp_path / "second", wider, tmp_path / "storage", attempt=2)
        assert rank.code == ExitCode.CHECKPOINT_MISMATCH


class TestFence:
    def test_an_old_attempt_ends_fenced_at_its_start(self, tmp_path):
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "fence.json").write_text('{"uid": "uid-1", "attempt": 7}')
        ranks = run(tmp_path / "run", small(), tmp_path, ranks=2, attempt=3)
        assert [rank.code for rank in ranks] == [ExitCode.FENCED] * 2
        assert "attempt 7" in ranks[1].report.error.message

    def test_an_attempt_that_is_overtaken_commits_nothing_more(self, tmp_path):
        training = small(steps=200, data=user("slow_samples"), **EVERY_TWO)
        fence = tmp_path / "test" / "fence.json"
        with launch(tmp_path / "run", job(training), storage=tmp_path) as world:
            world.wait_until((tmp_path / "test" / "step-2").exists)
            fence.write_text('{"uid": "uid-1", "attempt": 2}')
            committed = StepFolders(tmp_path / "test").complete()
            (rank,) = world.ended()
        assert rank.code == ExitCode.FENCED
        assert StepFolders(tmp_path / "test").complete()[-1] - committed[-1] <= 2
        assert json.loads(fence.read_text())["attempt"] == 2
        assert not list((tmp_path / "test").glob("*.partial-*"))

    @pytest.mark.parametrize(
        ("there", "may_start", "may_commit"),
        [
            (None, True, True),
            (("mine", 2), True, True),
            (("mine", 3), True, True),
            (("mine", 4), False, False),
            (("other", 1), True, False),
            (("other", 9), True, False),
        ],
    )
    def test_who_may_start_and_who_may_commit(self, tmp_path, there, may_start, may_commit):
        fence = Fence(tmp_path, Owner(uid="mine", attempt=3))
        if there is not None:
            (tmp_path / "fence.json").write_text(Owner(uid=there[0], attempt=there[1]).model_dump_json())
        for allowed, act in ((may_commit, fence.check), (may_start, fence.take)):
            if allowed:
                act()
            else:
                with pytest.raises(Fenced):
                    act()
        if may_start:
            fence.check()


class TestFolders:
    def test_incomplete_ones_are_ignored_and_cleaned_up(self, tmp_path):
        for name in ("step-10", "step-20", "step-30", "step-40.partial-1", "step-5.deleting", "other"):
            (tmp_path / name).mkdir()
        for name in ("step-10", "step-20", "step-40.partial-1", "step-5.deleting"):
            (tmp_path / name / ".metadata").touch()
        folders = StepFolders(tmp_path)
        assert folders.complete() == [10, 20]
        folders.clean()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step-10", "step-20"]

    def test_what_is_not_kept_is_deleted(self, tmp_path):
        for step in (5, 10, 100, 20):
            (tmp_path / f"step-{step}").mkdir()
            (tmp_path / f"step-{step}" / ".metadata").touch()
        StepFolders(tmp_path).keep({20, 100})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100", "step-20"]
