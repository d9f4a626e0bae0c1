"""Checkpoints in an object store: a real S3 server, moto's, on the loopback."""

import io
import random
import signal
from types import SimpleNamespace

import pytest
import torch
from s3fs import S3FileSystem
from safetensors.torch import load_file

from disttrain.main import main
from disttrain_api.names import ExitCode
from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint.fence import Fence
from disttrain_trainer.checkpoint.object_steps import ObjectSteps
from disttrain_trainer.checkpoint.owned_steps import OwnedSteps
from disttrain_trainer.checkpoint.step_manifest import StepManifest, flaws, read_manifest
from disttrain_trainer.runtime import object_path
from disttrain_trainer.runtime.errors import Fenced, InvalidConfiguration
from disttrain_trainer.runtime.files import read_bounded
from disttrain_trainer.runtime.object_path import ObjectPath
from tests.corpora import prepared
from tests.object_store import object_store
from tests.soak import SOAK
from tests.unit.trainer.comparisons import model_at, require_same_bits
from tests.unit.trainer.hostile import as_metadata
from tests.unit.trainer.test_verify import resumed_after
from tests.unit.trainer.worlds import job, launch, run_ranks, small, user
from tools.cluster.ports import free_port

UID = "1f3a9c2e-0000-4000-8000-000000000000"
KILLS = 20 if SOAK else 2
TRAINING = small(steps=6, checkpoint={"interval": 2, "keepLatest": 2}, logging={"interval": 1})


@pytest.fixture(scope="module")
def environment():
    """The server, and what a template's environment says about it; in this process, too."""
    with object_store(free_port()) as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        object_path._connected.cache_clear()
        yield settings
    object_path._connected.cache_clear()


@pytest.fixture(scope="module")
def client(environment):
    return S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


@pytest.fixture
def bucket(client, request):
    """A prefix in a bucket of the test's own."""
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    client.mkdir(name)
    return f"s3://{name}/runs"


def run(folder, training, url, ranks=2, attempt=1, **options):
    config = job(training, uid=UID)
    return run_ranks(folder, config, ranks=ranks, storage=url, attempt=attempt, **options)


def names(client, url):
    """Objects of the job's folder."""
    return sorted(path.split("/test/", 1)[1] for path in client.find(f"{url}/test"))


def unfinished(client, url):
    """Objects of checkpoints that are not complete."""
    found = [name for name in names(client, url) if name.startswith("step-")]
    complete = {name.partition("/")[0] for name in found if name.endswith("/manifest.json")}
    return [name for name in found if name.partition("/")[0] not in complete]


def folders(url):
    return ObjectSteps(ObjectPath(f"{url}/test"), UID)


class TestRuns:
    def test_stopped_and_resumed_equals_a_run_on_a_disk(self, environment, client, bucket, tmp_path):
        """Two attempts, another layout in the second, rotation, and nothing left over."""
        first = run(tmp_path / "first", {**TRAINING, "steps": 3}, bucket)
        assert [rank.code for rank in first] == [ExitCode.DONE] * 2, first[0].err
        assert first[1].report.checkpoint.path == f"{bucket}/test/step-3.1f3a9c2e-1"
        client.pipe_file(f"{bucket}/test/step-5.1f3a9c2e-1/__0_0.distcp", b"left over")
        second = run(tmp_path / "second", TRAINING, bucket, attempt=2)
        assert [rank.code for rank in second] == [ExitCode.DONE] * 2, second[0].err
        assert "resuming after step 3" in second[0].out
        one = [f"step-{step}.1f3a9c2e-2/{name}" for step in (4, 6) for name in (".metadata", "__0_0.distcp")]
        two = [f"step-{step}.1f3a9c2e-2/{name}" for step in (4, 6) for name in ("__1_0.distcp", "manifest.json")]
        (claim, *found) = names(client, bucket)
        assert claim.startswith("fence.000002.2.")
        assert found == sorted(one + two)
        local = tmp_path / "local"
        run(tmp_path / "third", TRAINING, local)
        target = tmp_path / "out.safetensors"
        assert main(["export", f"{bucket}/test", str(target)]) == 0
        found, expected = load_file(target), model_at(local, 6)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not (tmp_path / "s3:").exists()

    def test_a_damaged_one_is_passed_over(self, client, bucket, tmp_path):
        run(tmp_path / "first", {**TRAINING, "steps": 4}, bucket, ranks=1)
        path = f"{bucket}/test/step-4.1f3a9c2e-1/__0_0.distcp"
        client.pipe_file(path, client.cat_file(path)[:-1])
        ranks = run(tmp_path / "second", {**TRAINING, "steps": 4}, bucket, ranks=1, attempt=2)
        assert [rank.code for rank in ranks] == [ExitCode.DONE], ranks[0].err
        assert f"step 4 is damaged: {path} has" in ranks[0].out
        assert "resuming after step 2" in ranks[0].out
        assert folders(bucket).complete() == [2, 4]
        assert "1f3a9c2e-2" in str(folders(bucket).path(4))
        assert not any("1f3a9c2e-1" in name for name in names(client, bucket) if name.startswith("step-4"))

    @pytest.mark.timeout(2400 if SOAK else 300)
    def test_kills_amid_a_save_lose_no_checkpoint(self, environment, client, bucket, tmp_path):
        """Attempt after attempt, each killed when some of a checkpoint's objects are there, or just after the last."""
        chance, steps = random.Random(21), folders(bucket)
        training = {**TRAINING, "steps": 100_000, "checkpoint": {"interval": 1, "keepLatest": 2}}
        latest, amidst, attempt = 0, 0, 0
        while amidst < KILLS:
            attempt += 1
            assert attempt <= 5 * KILLS, f"{amidst} of {attempt - 1} kills came in the midst of a save"
            begun, victim, skipped = chance.randrange(1, 5), chance.randrange(2), chance.randrange(1, 4)
            options = {"storage": bucket, "attempt": attempt}
            with launch(tmp_path / f"run-{attempt}", job(training, uid=UID), ranks=2, **options) as world:
                world.wait_until(lambda: world.reached(latest + skipped))  # noqa: B023 - called at once
                reached = max(steps.complete(), default=0)
                world.wait_until(lambda: len(unfinished(client, bucket)) >= begun)  # noqa: B023
                world.processes[victim].send_signal(signal.SIGKILL)
                amidst += bool(unfinished(client, bucket))
            latest = max(steps.complete(), default=0)
            assert latest >= reached, f"attempt {attempt}"
            for step in steps.complete():
                manifest = read_manifest(steps.path(step))
                assert flaws(steps.path(step), manifest, manifest.files) == [], f"attempt {attempt}"
        last = run(tmp_path / "last", {**training, "steps": latest + 1}, bucket, attempt=attempt + 1)
        assert [rank.code for rank in last] == [ExitCode.DONE] * 2, last[0].err
        # What was written whole is committed by the next attempt.
        assert resumed_after(last[0].out) in (latest, latest + 1)
        assert steps.complete()[-1] == latest + 1
        assert unfinished(client, bucket) == []

    def test_ranks_with_another_store_are_named(self, bucket, tmp_path):
        other = bucket.replace("/runs", "/others")
        ranks = run(tmp_path, TRAINING, [bucket, other])
        assert [rank.code for rank in ranks] == [ExitCode.STORAGE_NOT_SHARED] * 2, ranks[0].err
        assert "ranks 1 do not see" in ranks[0].report.error.message

    def test_without_a_bucket_the_sentence_names_the_field(self, environment, tmp_path):
        ranks = run(tmp_path, TRAINING, "s3://no-such-bucket/runs", ranks=1)
        assert ranks[0].code == ExitCode.INVALID_CONFIGURATION, ranks[0].err
        assert "`storage`: rank 0 cannot write to s3://no-such-bucket/runs/test" in ranks[0].report.error.message

    def test_a_job_begins_with_weights_from_the_store(self, bucket, tmp_path):
        run(tmp_path / "first", {**TRAINING, "steps": 2}, bucket, ranks=1)
        checkpoint = {"initialFrom": "test", "folder": "another"}
        training = {**TRAINING, "steps": 2, "checkpoint": checkpoint, "model": user("double_mlp")}
        config = job(training, uid=UID) | {"checkpointFolder": "another"}
        ended = run_ranks(tmp_path / "second", config, storage=bucket)
        assert [rank.code for rank in ended] == [ExitCode.DONE], ended[0].err
        assert f"weights from {bucket}/test/step-2.1f3a9c2e-1" in ended[0].out

    def test_a_hostile_one_runs_nothing(self, client, bucket, tmp_path, capfd):
        """It is neither gone on from, nor exported, nor begun with."""
        run(tmp_path / "first", {**TRAINING, "steps": 2}, bucket, ranks=1)
        place = f"{bucket}/test/step-2.1f3a9c2e-1"
        client.get(place, str(tmp_path / "step-2"), recursive=True)
        as_metadata(tmp_path / "step-2", tmp_path / "mark")
        client.put(f"{tmp_path}/step-2/", f"{place}/", recursive=True)
        sentence = f"{place}/.metadata is no metadata of a checkpoint: it holds `posix.mkdir`"
        (resumed,) = run(tmp_path / "second", {**TRAINING, "steps": 3}, bucket, ranks=1, attempt=2)
        assert resumed.code == ExitCode.CHECKPOINT_BROKEN
        assert sentence in resumed.report.error.message
        config = job({**TRAINING, "steps": 1, "checkpoint": {"initialFrom": "test"}}, uid=UID)
        (begun,) = run_ranks(tmp_path / "third", config | {"checkpointFolder": "another"}, storage=bucket)
        assert begun.code == ExitCode.CHECKPOINT_BROKEN
        assert sentence in begun.report.error.message
        assert main(["export", place, str(tmp_path / "out.safetensors")]) == 1
        assert sentence in capfd.readouterr().err
        assert not (tmp_path / "mark").exists()


class TestSteps:
    def write(self, steps, step, number, commit=True):
        partial = steps.partial(step, number)
        for name in ("__0_0.distcp", ".metadata"):
            (partial / name).write_text("content")
        manifest = StepManifest(step=step, attempt=number, world_size=1, mesh={})
        (partial / "manifest.pending").write_text(manifest.text())
        return steps.commit(partial, step, number) if commit else partial

    def owner(self, bucket, attempt):
        steps = folders(bucket)
        owner = OwnedSteps(steps, Fence(steps.folder, UID, attempt), Checkpoint(keep_latest=1))
        return owner, owner.take_over()

    def test_only_manifest_and_metadata_make_one_complete(self, bucket):
        steps = folders(bucket)
        assert steps.look() == ([], [])
        self.write(steps, 10, 1)
        self.write(steps, 20, 1, commit=False)
        (steps.partial(30, 1) / "manifest.json").write_text("written by one that has slept")
        assert steps.complete() == [10]
        assert [one.step for one in steps.look().unfinished] == [20, 30]

    def test_the_last_claim_of_a_step_counts(self, bucket):
        steps = folders(bucket)
        self.write(steps, 10, 2)
        self.write(steps, 10, 1)
        assert steps.complete() == [10]
        assert read_manifest(steps.path(10)).attempt == 2

    def test_a_commit_replaces_those_of_the_same_step(self, client, bucket):
        owner, number = self.owner(bucket, 1)
        steps = folders(bucket)
        owner.commit(self.write(steps, 10, number, commit=False), 10)
        newer, number = self.owner(bucket, 2)
        newer.commit(self.write(steps, 10, number, commit=False), 10)
        assert steps.complete() == [10]
        assert {name.partition("/")[0] for name in names(client, bucket) if name.startswith("step")} == {
            "step-10.1f3a9c2e-2"
        }
        with pytest.raises(Fenced, match="belongs to attempt 2 of this job, this is attempt 1"):
            owner.commit(self.write(steps, 20, 1, commit=False), 20)

    def test_what_is_set_aside_goes_when_its_step_is_reached(self, bucket):
        owner, number = self.owner(bucket, 1)
        steps = folders(bucket)
        for step in (10, 20, 30):
            self.write(steps, step, number)
        steps.set_aside(steps.path(20).name)
        assert steps.complete() == [10, 30]
        owner, number = self.owner(bucket, 2)
        owner.commit(self.write(steps, 15, number, commit=False), 15)
        assert (steps.partial(20, 1) / "broken").exists()
        owner.commit(self.write(steps, 20, number, commit=False), 20)
        assert not steps.partial(20, 1).exists()
        assert steps.complete() == [20, 30]

    def test_other_protocols_need_their_package(self):
        with pytest.raises(InvalidConfiguration, match=r"gs://.*disttrain\[s3\]"):
            ObjectPath("gs://bucket/x").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corpus_in_the_store_trains_as_one_on_a_disk(client, bucket, tmp_path, workers):
    """Red where a process that reads ahead uses the connections of the one that it was forked from."""
    folder = prepared(tmp_path / "corpus", part_bytes=10_000)
    client.put(f"{folder}/", f"{bucket}/", recursive=True)
    found = []
    for path in (str(folder), bucket):
        data = {"name": "corpus", "config": {"path": path, "sequenceLength": 16}}
        model = {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8}}
        training = {"model": model, "data": data, "steps": 4, "globalBatchSize": 4, "dataWorkers": workers}
        storage = tmp_path / f"storage-{len(found)}"
        ranks = run_ranks(tmp_path / f"world-{len(found)}", job(training), ranks=2, storage=storage)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
        found.append(model_at(storage, 4))
    require_same_bits(*found)


def test_a_store_that_fails_while_an_object_is_read_is_an_os_error(monkeypatch):
    failure = type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})

    class Unread(io.BytesIO):
        def read(self, size=-1):
            raise failure("could not connect")

    monkeypatch.setattr(object_path, "_connected", lambda *_: SimpleNamespace(open=lambda url, mode: Unread()))
    with pytest.raises(OSError, match="EndpointConnectionError: could not connect"):
        read_bounded(ObjectPath("s3://bucket/object"), 10)
