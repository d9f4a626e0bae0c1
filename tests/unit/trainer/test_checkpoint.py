"""Checkpoints in real processes: SIGTERM, SIGKILL, full disks, fences, other models."""

import json
import os
import signal
import subprocess
from contextlib import suppress

import pytest

from disttrain_agent.checkpoint_request import checkpoint_request_file
from disttrain_api.names import ExitCode, permanent_reason
from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint.fence import Fence
from disttrain_trainer.checkpoint.owned_steps import OwnedSteps
from disttrain_trainer.checkpoint.storage import StepFolders, newest_seen, report_of
from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointsTaken, Fenced
from tests.unit.trainer.comparisons import model_at, require_same_bits
from tests.unit.trainer.worlds import job, launch, run_cases, run_ranks, small, user

REFUSES = {
    Fenced: "belongs to attempt 4 of this job, this is attempt 3",
    CheckpointsTaken: "the job with uid (other|third) has taken over",
}


def run(folder, training, storage, **options):
    return run_ranks(folder, job(training), storage=storage, **options)


class TestSigterm:
    def test_before_the_first_step_a_rank_exits_at_once(self, tmp_path):
        with launch(tmp_path, job(small(data=user("waiting_samples", folder=str(tmp_path))))) as world:
            world.wait_until((tmp_path / "called").exists)
            world.processes[0].send_signal(signal.SIGTERM)
            (rank,) = world.ended()
        assert rank.code == ExitCode.STOPPED
        assert rank.report.error.message == "SIGTERM came before the first step"


class TestRequest:
    """A checkpoint that somebody asks the agent for, between two that are due."""

    @pytest.fixture(scope="class")
    @classmethod
    def storages(cls, tmp_path_factory):
        """A run that is asked, and killed once it has saved; the step of that checkpoint; a run that is left alone."""
        folder = tmp_path_factory.mktemp("asked")
        training = small(steps=40, model=user("wide_mlp"), logging={"interval": 1}, checkpoint={"interval": 40})
        slow = training | {"data": user("slow_samples")}
        with launch(folder / "asked", job(slow), ranks=2, storage=folder / "a") as world:
            world.wait_until(lambda: world.reached(3))
            os.utime(checkpoint_request_file(folder / "asked" / "reports"))
            world.wait_until(lambda: newest_seen(folder / "a" / "test") is not None)
            for process in world.processes:
                process.send_signal(signal.SIGKILL)
            world.ended()
        step = newest_seen(folder / "a" / "test").step
        resumed = run(folder / "resumed", training, folder / "a", ranks=2, attempt=2)
        through = run(folder / "through", training, folder / "b", ranks=2)
        return folder, step, resumed, through

    def test_the_next_attempt_goes_on_from_it(self, storages):
        _, step, resumed, _ = storages
        assert 3 <= step < 40
        assert f"resuming after step {step}" in resumed[0].out
        assert "loaded while Restoring, 40 steps in all" in resumed[0].out

    def test_and_ends_where_the_other_run_ends(self, storages):
        folder, _, _, through = storages
        assert through[0].code == ExitCode.DONE
        require_same_bits(model_at(folder / "a", 40), model_at(folder / "b", 40))


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
            assert "a larger volume in `storage`" in full[0].report.error.message
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
            "more data": then(data=user("double_samples", size=63)),
            "other data": then(data=user("double_samples", seed=6)),
            "fewer steps": [first, {"training": small(steps=1)}],
        }
        folder = tmp_path_factory.mktemp("mismatch")
        results = run_cases(folder, 1, cases)
        return {
            "log": (folder / "rank-0.out").read_text(),
            **{name: result["errors"][-1] for name, result in results.items()},
        }

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

    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("more data", "step-2 was written with 50 training samples, and there are 63 now: their order begins anew"),
            (
                "other data",
                "step-2 was written with other training samples: there are 50, too, and sample 0 is another",
            ),
            ("fewer steps", "nothing to do: 2 steps are done, and `training.steps` is 1"),
        ],
    )
    def test_what_is_not_as_it_was_is_reported_once(self, errors, name, line):
        assert errors[name] is None
        assert errors["log"].count(line) == 1


class TestFence:
    @pytest.mark.parametrize(
        ("there", "code", "sentence"),
        [
            ([("uid-1", 7)], ExitCode.FENCED, "belongs to attempt 7 of this job"),
            ([("uid-1", 2), ("uid-2", 1)], ExitCode.CHECKPOINTS_TAKEN, "the job with uid uid-2 has taken over"),
        ],
    )
    def test_who_may_not_start_says_so_and_ends(self, tmp_path, there, code, sentence):
        (tmp_path / "test").mkdir()
        for uid, attempt in there:
            Fence(tmp_path / "test", uid, attempt).take()
        ranks = run(tmp_path / "run", small(), tmp_path, ranks=2, attempt=3)
        assert [rank.code for rank in ranks] == [code] * 2
        assert sentence in ranks[1].report.error.message
        assert (permanent_reason(code) == "CheckpointsTaken") == (code == ExitCode.CHECKPOINTS_TAKEN)

    @pytest.mark.parametrize(
        ("there", "error"),
        [
            ([], None),
            ([("mine", 2)], None),
            ([("mine", 3)], None),
            ([("mine", 4)], Fenced),
            ([("other", 9)], None),
            ([("mine", 2), ("other", 1)], CheckpointsTaken),
            ([("other", 1), ("mine", 2)], None),
            ([("other", 1), ("mine", 2), ("third", 1)], CheckpointsTaken),
        ],
    )
    def test_who_may_start(self, tmp_path, there, error):
        for uid, attempt in there:
            Fence(tmp_path, uid, attempt).take()
        fence = Fence(tmp_path, "mine", 3)
        if error is None:
            fence.take()
            fence.check()
        else:
            with pytest.raises(error, match=REFUSES[error]):
                fence.take()

    @pytest.mark.parametrize(
        ("taken", "error"),
        [(("mine", 2), None), (("mine", 3), Fenced), (("mine", 4), Fenced), (("other", 1), CheckpointsTaken)],
    )
    def test_who_may_commit(self, tmp_path, taken, error):
        """Red without the look at another process of the same attempt, at a later attempt, and at another job."""
        fence = Fence(tmp_path, "mine", 3)
        fence.take()
        try:
            Fence(tmp_path, *taken).take()
        except Fenced:
            assert error is None
        if error is None:
            fence.check()
        else:
            same = taken == ("mine", 3)
            with pytest.raises(error, match="another process of attempt 3" if same else REFUSES[error]):
                fence.check()

    def test_a_job_leaves_one_claim_however_often_it_is_restarted(self, tmp_path):
        for uid in ("one", "two"):
            for attempt in range(1, 6):
                Fence(tmp_path, uid, attempt).take()
        assert sorted(path.name.split(".")[-1] for path in tmp_path.iterdir()) == ["one", "two"]

    @pytest.mark.parametrize(
        ("there", "error"), [(("mine", 2), None), (("mine", 3), None), (("mine", 4), Fenced), (("other", 9), None)]
    )
    def test_the_fence_of_earlier_versions_counts(self, tmp_path, there, error):
        (tmp_path / "fence.json").write_text(json.dumps(dict(zip(("uid", "attempt"), there, strict=True))))
        fence = Fence(tmp_path, "mine", 3)
        if error is not None:
            with pytest.raises(error, match=REFUSES[error]):
                fence.take()
            return
        assert fence.take().number == there[1] + 1, "what is written from now on has a name of its own"
        # An attempt of that version may come later.
        (tmp_path / "fence.json").write_text('{"uid": "mine", "attempt": 4}')
        with pytest.raises(Fenced, match=REFUSES[Fenced]):
            fence.check()

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("fence.json", b""),
            ("fence.json", b"{"),
            ("fence.json", b'{"uid": "mine"}'),
            ("fence.json", b'{"uid": "mine", "attempt": -1}'),
            ("fence.json", b'{"uid": "mine", "attempt": 1' + b"0" * 5000 + b"}"),
            ("fence.json", b"[" * 100_000),
            ("fence.json", b'"' + b"x" * 100_000 + b'"'),
            ("fence.something", b""),
            ("fence.000001.1.aa.mine.tmp", b""),
            ("fence." + "9" * 200 + ".1.aa.mine", b""),
        ],
    )
    def test_a_damaged_one_is_named(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        for act in (Fence(tmp_path, "mine", 3).take, Fence(tmp_path, "mine", 3).check):
            with pytest.raises(CheckpointBroken, match=f"{name[:20]}.* remove it"):
                act()

    def test_any_uid_makes_a_name(self, tmp_path):
        fence = Fence(tmp_path, "../a job/with.dots" + "x" * 300, 1)
        fence.take()
        fence.check()
        assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(Fenced, match="belongs to attempt 1 of this job, this is attempt 0"):
            Fence(tmp_path, fence.uid, 0).take()


class TestFolders:
    def write(self, path):
        path.mkdir()
        (path / ".metadata").touch()

    def test_what_is_none_of_ours_is_passed_over(self, tmp_path):
        for name in ("step-10", "step-20", "step-20.3", "step-999999999999999999999", "step-" + "9" * 250, "other"):
            self.write(tmp_path / name)
        (tmp_path / "step-30").mkdir()
        (tmp_path / "step-40").write_text("a file")
        (tmp_path / "step-50").symlink_to(tmp_path / "step-10")
        (tmp_path / "step-60").symlink_to(tmp_path / "nowhere")
        (tmp_path / "step-70").symlink_to("step-70")
        os.mkfifo(tmp_path / "step-80")
        folders = StepFolders(tmp_path)
        assert folders.complete() == [10, 20]
        assert folders.path(20) == tmp_path / "step-20.3"
        assert newest_seen(tmp_path).path == str(tmp_path / "step-20.3")

    @pytest.mark.parametrize("there", ["nothing", "a checkpoint", "a file", "an empty folder", "rubbish", "a link"])
    def test_a_commit_replaces_a_checkpoint_and_leaves_all_else(self, tmp_path, there):
        path, partial = tmp_path / "step-10", tmp_path / "step-10.partial-4"
        self.write(partial)
        if there == "a file":
            path.write_text("")
        elif there == "a link":
            path.symlink_to(tmp_path)
        elif there != "nothing":
            path.mkdir()
        if there in ("a checkpoint", "rubbish"):
            (path / (".metadata" if there == "a checkpoint" else "something")).touch()
        free = there in ("nothing", "an empty folder")
        folders = StepFolders(tmp_path)
        assert folders.commit(partial, 10, 4) == (path if free else tmp_path / "step-10.4")
        assert folders.complete() == [10]
        assert path.exists()
        assert folders.path(10).name == ("step-10" if free else "step-10.4")

    def test_taking_over_clears_away_what_others_left(self, tmp_path):
        for name in ("step-10", "step-40.partial-1", "step-5.deleting", "step-6.deleting-1a2b", "other"):
            self.write(tmp_path / name)
        owner = OwnedSteps(StepFolders(tmp_path), Fence(tmp_path, "mine", 3), Checkpoint())
        # As though claims 1 and 2 were given up long ago.
        Fence(tmp_path, "theirs", 1).take()
        Fence(tmp_path, "theirs", 2).take()
        assert owner.take_over() == 3
        assert sorted(path.name for path in tmp_path.glob("[!f]*")) == ["other", "step-10"]

    def test_what_was_just_committed_stays_beside_higher_steps(self, tmp_path):
        """Whoever has put the higher ones there."""
        owner = OwnedSteps(StepFolders(tmp_path), Fence(tmp_path, "mine", 1), Checkpoint(keep_latest=1))
        number = owner.take_over()
        self.write(tmp_path / "step-500")
        for step in (10, 20):
            partial = StepFolders(tmp_path).partial(step, number)
            self.write(partial)
            path = owner.commit(partial, step)
            assert report_of(step, path).path == str(tmp_path / f"step-{step}")
            assert StepFolders(tmp_path).complete() == [step, 500]

    def test_a_report_of_one_that_is_gone_is_no_error(self, tmp_path):
        assert report_of(10, tmp_path / "step-10").step == 10
