"""Damaged checkpoints are found, named and passed over; a kill at any byte of a save loses none."""

import errno
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disttrain_api.names import ExitCode
from disttrain_trainer.checkpoint.step_manifest import MANIFEST_FILE, StepManifest, flaws, read_manifest
from disttrain_trainer.checkpoint.storage import StepFolders
from disttrain_trainer.checkpoint.verify import lone_flaw_of
from tests.soak import SOAK
from tests.suites import examples
from tests.unit.trainer.comparisons import model_at
from tests.unit.trainer.test_checkpoint import run
from tests.unit.trainer.worlds import job, launch, small, user

TRAINING = small(steps=6, checkpoint={"interval": 2, "keepLatest": 3}, logging={"interval": 1})


def found(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, by one process."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return [manifest] if isinstance(manifest, str) else flaws(folder, manifest, manifest.files)


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Steps 2, 4 and 6 of two ranks."""
    storage = tmp_path_factory.mktemp("written")
    assert [rank.code for rank in run(storage / "run", TRAINING, storage, ranks=2)] == [0, 0]
    return storage / "test"


@pytest.fixture
def damaged(written, tmp_path):
    """A copy to damage, and how to go on from it."""
    shutil.copytree(written, tmp_path / "storage" / "test")
    return tmp_path / "storage" / "test"


def resumed_after(out: str) -> int:
    """The step that a run says it goes on from."""
    found = re.search(r"resuming after step (\d+)", out)
    assert found is not None, out
    return int(found[1])


def go_on(folder, tmp_path, steps=8):
    return run(tmp_path / "second", {**TRAINING, "steps": steps}, folder.parent, ranks=2, attempt=2)


class TestManifest:
    def test_says_what_wrote_it(self, written):
        manifest = read_manifest(written / "step-4")
        assert isinstance(manifest, StepManifest)
        assert (manifest.step, manifest.attempt, manifest.world_size) == (4, 1, 2)
        assert manifest.mesh == {"pipeline": 1, "replicate": 2, "shard": 1, "context": 1, "tensor": 1, "expert": 1}
        assert set(manifest.files) == {path.name for path in (written / "step-4").iterdir()} - {MANIFEST_FILE}
        assert found(written / "step-4") == []

    @settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_changed_bit_and_any_missing_end_is_found(self, written, data):
        folder = written / "step-2"
        path = folder / data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        try:
            if data.draw(st.booleans()):
                flip(path, at, data.draw(st.integers(0, 7)))
            else:
                path.write_bytes(content[:at])
            assert [str(path) in flaw for flaw in found(folder)] == [True]
        finally:
            path.write_bytes(content)
        assert found(folder) == []

    def test_a_missing_file_is_found(self, damaged):
        (damaged / "step-2" / ".metadata").unlink()
        assert found(damaged / "step-2") == [f"{damaged}/step-2/.metadata cannot be read: No such file or directory"]


class TestDamaged:
    def test_the_one_before_is_taken(self, written, damaged, tmp_path):
        """Also past two damaged ones; what is set aside goes when its step is reached again."""
        flip(damaged / "step-6" / "__1_0.distcp", 100)
        (damaged / "step-4" / "__0_0.distcp").unlink()
        ranks = go_on(damaged, tmp_path, steps=4)
        assert [rank.code for rank in ranks] == [ExitCode.DONE] * 2
        assert f"step 6 is damaged: {damaged}/step-6/__1_0.distcp has other bytes" in ranks[0].out
        assert f"step 4 is damaged: {damaged}/step-4/__0_0.distcp cannot be read" in ranks[0].out
        assert "resuming after step 2" in ranks[0].out
        assert StepFolders(damaged).complete() == [2, 4]
        assert [path.name for path in damaged.glob("*.broken")] == ["step-6.broken"]
        own, theirs = model_at(damaged.parent, 4), model_at(written.parent, 4)
        assert all(torch.equal(own[name], theirs[name]) for name in theirs)

    def test_with_none_left_the_job_ends_and_touches_nothing(self, damaged, tmp_path):
        for step in (2, 4, 6):
            flip(damaged / f"step-{step}" / ".metadata", 50)
        ranks = go_on(damaged, tmp_path)
        assert [rank.code for rank in ranks] == [ExitCode.CHECKPOINT_BROKEN] * 2
        for step in (2, 4, 6):
            assert f"{damaged}/step-{step}/.metadata" in ranks[1].report.error.message
        assert StepFolders(damaged).complete() == [2, 4, 6]

    def test_without_a_manifest_it_is_loaded_unchecked(self, damaged, tmp_path):
        (damaged / "step-6" / MANIFEST_FILE).unlink()
        ranks = go_on(damaged, tmp_path)
        assert [rank.code for rank in ranks] == [ExitCode.DONE] * 2
        assert f"{damaged}/step-6 has no manifest" in ranks[0].out
        assert "resuming after step 6" in ranks[0].out


KILLS = 20 if SOAK else 4
"""In the midst of a save. Some of the others come a moment too late, as some are meant to."""


@pytest.mark.timeout(2400 if SOAK else 300)
def test_kills_at_any_byte_of_a_save_lose_no_checkpoint(tmp_path):
    """Attempt after attempt on one storage, each killed at a random byte of a save, or a moment after the last one."""
    chance = random.Random(20)
    training = small(
        model=user("wide_mlp"), optimizer={"name": "AdamW"}, checkpoint={"interval": 1, "keepLatest": 2},
    )  # fmt: skip
    storage = tmp_path / "storage"
    folders = StepFolders(storage / "test")
    latest, amidst, attempt = 0, 0, 0
    while amidst < KILLS:
        attempt += 1
        assert attempt <= 5 * KILLS, f"{amidst} of {attempt - 1} kills came in the midst of a save"
        # Two ranks write 13 MB together; beyond it lie metadata, manifest, rename and rotation.
        aim, victim, skipped = chance.randrange(15_000_000), chance.randrange(2), chance.randrange(1, 4)
        config = job({**training, "steps": 100_000})
        with launch(tmp_path / f"run-{attempt}", config, ranks=2, storage=storage, attempt=attempt) as world:
            world.wait_until(lambda: world.reached(latest + skipped))  # noqa: B023 - called at once
            reached = _latest_of(folders)
            world.wait_until(lambda: _bytes_being_written(folders.folder) >= min(aim, 12_900_000))  # noqa: B023
            if aim > 13_000_000:
                world.wait_until(lambda: _latest_of(folders) > reached)  # noqa: B023
            world.processes[victim].send_signal(signal.SIGKILL)
            amidst += any(folders.folder.glob("*.partial-*"))
        assert _latest_of(folders) >= reached, f"attempt {attempt}"
        for step in folders.complete():
            assert found(folders.path(step)) == [], f"attempt {attempt}"
        latest = _latest_of(folders)
    last = run(tmp_path / "last", {**training, "steps": latest + 1}, storage, ranks=2, attempt=attempt + 1)
    assert [rank.code for rank in last] == [ExitCode.DONE] * 2
    # What was written whole is committed by the next attempt.
    assert resumed_after(last[0].out) in (latest, latest + 1)
    assert folders.complete()[-1] == latest + 1
    assert not list(folders.folder.glob("*.partial-*"))


def _latest_of(folders: StepFolders) -> int:
    return max(folders.complete(), default=0)


def _bytes_being_written(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.partial-*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            # Committed between listing and looking.
            return 0
    return total


class TestOutOfReach:
    """A storage that does not answer says nothing of the checkpoints on it."""

    @pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
    @pytest.mark.parametrize("name", [MANIFEST_FILE, "__0_0.distcp", ".metadata"])
    def test_it_is_raised_and_no_flaw(self, written, monkeypatch, name, code):
        opened = os.open

        def out_of_reach(path, *rest, **others):
            if Path(path).name == name:
                raise OSError(code, os.strerror(code), str(path))
            return opened(path, *rest, **others)

        monkeypatch.setattr(os, "open", out_of_reach)
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            lone_flaw_of(written / "step-2")
        monkeypatch.undo()
        assert lone_flaw_of(written / "step-2") is None

    def test_a_lost_block_is_a_flaw(self, written, monkeypatch):
        def lost(*_, **others):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "open", lost)
        assert lone_flaw_of(written / "step-2") == f"{written}/step-2/{MANIFEST_FILE} cannot be read: {os.strerror(5)}"
