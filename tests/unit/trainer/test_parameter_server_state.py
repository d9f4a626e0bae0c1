"""A server as a function of messages: what it takes in, what it remembers, what a snapshot brings back."""

import io
import itertools
import os
from pathlib import Path

import pytest
import torch

from disttrain_api.batch import Batch
from disttrain_api.jobconfig import JobConfig
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_api.training import Optimizer, OptimizerName, Training
from disttrain_trainer.parameter_server.protocol.settings import resumes_from_snapshots
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message, decode, key_of
from disttrain_trainer.parameter_server.server.aggregation import Aggregator, Push
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.server.shard import Shard
from disttrain_trainer.parameter_server.server.snapshots import Snapshots, _frames, claim_incarnation
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.object_path import ObjectPath
from tests.builders import TRAINING
from tests.unit.trainer.worlds import job

KEY = key_of("token", "uid", 1)
ASKER = (b"worker", b"1")
NUMBERS = itertools.count(2)
SGD = Optimizer(name=OptimizerName.SGD, learning_rate=1.0)


def a_server(synchronization=Synchronization.ASYNC):
    """Server 1 of a job of two workers, which holds three ranges."""
    training = Training.model_validate({**TRAINING, "optimizer": {"name": "AdamW", "learningRate": 0.1}})
    settings = ParameterServer(synchronization=synchronization, snapshot_interval=3)
    return Server(ServerConfig(1, 2, training, Batch(16, 1, 32), settings, snapshots=True))


def send(server, kind, tensors=(), **fields):
    asker = (b"worker", b"%d" % next(NUMBERS))
    [(receiver, answer)] = server.receive(asker, Message(kind, {"worker": 0, **fields}, tensors), 0.0)
    assert receiver == asker
    return answer


def push(server, step, part, seed=0, lengths=(3, 1, 4)):
    generator = torch.Generator().manual_seed(seed + 10 * step + part)
    gradients = [torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]
    fields = {"task": [step, part], "weight": 2.0, "taken": 0, "floor": 0, "ranges": [0, 1, 2]}
    return send(server, "push", gradients, **fields).fields["fresh"]


def loaded(server):
    values = [torch.ones(length, dtype=torch.float64) for length in (3, 1, 4)]
    assert send(server, "load", values, states=[[], [], []]).kind == "loaded"
    return server


def same(one, other):
    found, expected = (send(server, "pull", ranges=[0, 1, 2]) for server in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, expected.tensors, strict=True))
    assert found.fields == expected.fields


class TestDesertion:
    def test_a_server_is_deserted_once_it_has_had_no_message_for_a_while(self):
        server = a_server()
        assert not server.has_no_workers(100.0), "nobody can have been heard yet"
        server.tick(100.0)
        assert not server.has_no_workers(110.0)
        server.receive(ASKER, Message("alive", {"worker": 0}), 109.0)
        assert [server.has_no_workers(now) for now in (111.0, 119.0, 119.5)] == [False, False, True]


class TestSnapshots:
    def test_a_server_goes_on_as_if_nothing_had_been(self, tmp_path):
        first = loaded(a_server())
        assert first.snapshot() is not None, "as soon as there is something to lose"
        assert [push(first, 0, 0), push(first, 0, 1)] == [True, True]
        assert first.snapshot() is None, "not yet due"
        push(first, 1, 0)
        snapshots = Snapshots(tmp_path / "servers" / "one", KEY)
        snapshots.write(first.snapshot())
        snapshots._writer.join()
        second = a_server()
        second.restore(snapshots.read())
        same(second, first)
        assert [push(one, 0, 1, seed=99) for one in (first, second)] == [False, False], "taken in before"
        assert [push(one, 1, 1) for one in (first, second)] == [True, True]
        same(second, first)

    def written(self, file):
        snapshots = Snapshots(file, KEY)
        snapshots.write(loaded(a_server()).snapshot())
        snapshots._writer.join()
        assert snapshots.read() is not None
        return snapshots

    def test_what_somebody_else_has_put_there_is_not_read(self, tmp_path):
        """Red without the refusal of links, and without that of what is no file."""
        file = tmp_path / "one"
        snapshots = self.written(file)
        elsewhere = file.rename(tmp_path / "elsewhere")
        # What it leads to would be read.
        file.symlink_to(elsewhere)
        assert snapshots.read() is None
        file.unlink()
        # Who opens it to read waits for a writer.
        os.mkfifo(file)
        assert snapshots.read() is None

    def test_one_of_another_attempt_or_half_of_one_is_not_read(self, tmp_path):
        """Red without any of the guards that its reasons belong to."""
        file = tmp_path / "one"
        assert Snapshots(file, KEY).read() is None
        snapshots = self.written(file)
        data = file.read_bytes()
        with pytest.raises(Malformed, match="not authenticated"):
            decode(_frames(io.BytesIO(data)), key_of("token", "uid", 2))
        assert Snapshots(file, key_of("token", "uid", 2)).read() is None
        # Between two frames the header says that more follow.
        between = "^(0 bytes in the first frame|[0-9]+ frames, the header says|a snapshot ends within)"
        for length in range(len(data)):
            with pytest.raises(Malformed, match=between):
                decode(_frames(io.BytesIO(data[:length])), KEY)
            file.write_bytes(data[:length])
            assert snapshots.read() is None
        for end, within in ((4, "a length"), (20, "a frame")):
            with pytest.raises(Malformed, match=f"a snapshot ends within {within}"):
                list(_frames(io.BytesIO(data[:end])))

    @pytest.mark.parametrize("length", [2**18 + 1, 2**40, 2**64 - 1])
    def test_no_more_is_read_of_a_strangers_file_than_a_header(self, tmp_path, length):
        """Red without the bound on a frame, and where the file is read before the bound is looked at."""
        file = tmp_path / "one"
        file.write_bytes(length.to_bytes(8, "little") + bytes(2**19))
        assert Snapshots(file, KEY).read() is None
        with file.open("rb", buffering=0) as opened:
            with pytest.raises(Malformed, match=f"a frame of {length} bytes, expected at most {2**18}"):
                list(_frames(opened))
            assert opened.tell() == 8

    def test_one_whose_life_is_gone_writes_nothing(self, tmp_path):
        claim, _ = claim_incarnation(tmp_path, 0, 1)
        snapshots = Snapshots(tmp_path / "one", KEY, claim)
        claim.unlink()
        snapshots.write(loaded(a_server()).snapshot())
        snapshots._writer.join()
        assert snapshots.read() is None


class TestPushes:
    def test_the_order_of_arrival_changes_no_bit_of_a_step(self):
        results = []
        for parts in itertools.permutations(range(3)):
            shard = Shard([torch.ones(5)], SGD)
            aggregator = Aggregator(shard, 3, lambda step: 0.1, together=True)
            generator = torch.Generator().manual_seed(0)
            pushed = [torch.randn(5, generator=generator) for _ in parts]
            for part in parts:
                aggregator.take(Push(Task(0, part), part + 0.3, {0: pushed[part]}, 0, 0))
                aggregator.take(Push(Task(0, part), 7.0, {0: torch.ones(5)}, 0, 0))
            assert (shard.version, aggregator.taken, aggregator.late) == (1, 3, 3)
            results.append(shard.values()[0])
        assert all(torch.equal(result, results[0]) for result in results)

    @pytest.mark.parametrize(("aware", "expected"), [(False, 1.0), (True, 0.5)])
    def test_staleness_is_what_others_pushed_in_between_and_may_lower_the_rate(self, aware, expected):
        shard = Shard([torch.zeros(1)], SGD)
        aggregator = Aggregator(shard, 3, lambda step: 1.0, together=False, staleness_aware=aware)
        for part in range(2):
            aggregator.take(Push(Task(0, part), 1.0, {}, part, 0))
        before = shard.values()[0].clone()
        aggregator.take(Push(Task(0, 2), 1.0, {0: torch.ones(1)}, 0, 0))
        assert aggregator.staleness == {0: 2, 2: 1}
        assert before - shard.values()[0] == expected

    def test_a_part_without_samples_moves_nothing(self):
        shard = Shard([torch.zeros(2)], SGD)
        aggregator = Aggregator(shard, 1, lambda step: 1.0, together=False)
        assert aggregator.take(Push(Task(0, 0), 0.0, {0: torch.ones(2)}, 0, 0))
        assert (shard.version, aggregator.taken) == (0, 1)

    @pytest.mark.parametrize(
        ("kind", "fields", "lengths", "why"),
        [
            ("steal", {}, (), "unknown message 'steal'"),
            ("push", {"ranges": [0, 0]}, (3, 3), "names its tensors' ranges once each"),
            ("push", {"ranges": [0, 1]}, (3,), "names its tensors' ranges once each"),
            ("push", {"ranges": [0, 1], "counts": [2]}, (3, 1), "names its tensors' ranges once each"),
            ("push", {"ranges": [3]}, (3,), "range 3 of 3"),
            ("push", {"ranges": [0]}, (4,), r"a range of tensors \[\(4, "),
            ("push", {"ranges": [0], "task": [1]}, (3,), "1 numbers, expected a step and a part"),
            ("push", {"ranges": [0], "weight": "1"}, (3,), "`weight` of push is '1', expected a number"),
            ("push", {"ranges": 0}, (3,), "`ranges` of push is 0, expected a list"),
            ("load", {"states": [["momentum_buffer"]]}, (3,), "1 tensors for 1 ranges and their states"),
            ("load", {"states": [0]}, (3,), "no list of lists"),
            ("load", {"states": [[]], "widths": [2]}, (3,), "not those of the ranges' rows"),
            ("load", {"states": [[]], "widths": []}, (3,), "not those of the ranges' rows"),
            ("pull", {"worker": 2, "ranges": [0]}, (), "worker 2 of 2"),
            ("pull", {"worker": None, "ranges": [0]}, (), "`worker` of pull is None"),
            ("pull", {"ranges": [3]}, (), "no ranges of the 3 that there are"),
            ("pull", {"ranges": [1, 1]}, (), "no ranges of the 3 that there are"),
            ("rows", {"range": 0}, (1,), "range 0 has no rows"),
            ("rows", {"range": 3}, (1,), "range 3 has no rows"),
        ],
    )
    def test_what_makes_no_sense_changes_nothing(self, kind, fields, lengths, why):
        """Red without the guard that each reason belongs to."""
        server, untouched = loaded(a_server()), loaded(a_server())
        form = torch.int64 if kind == "rows" else torch.float64
        tensors = [torch.ones(length, dtype=form) for length in lengths]
        given = {"worker": 0, "task": [0, 0], "weight": 1.0, "taken": 0, "floor": 0, **fields}
        with pytest.raises(Malformed, match=why):
            server.receive(ASKER, Message(kind, given, tensors), 0.0)
        same(server, untouched)


@pytest.mark.parametrize(
    ("folder", "synchronization", "expected"),
    [
        (Path("/storage/job"), "Async", True),
        (Path("/storage/job"), "Sync", False),
        (ObjectPath("s3://bucket/job"), "Async", False),
        (None, "BoundedStaleness", False),
    ],
)
def test_a_server_goes_on_from_a_snapshot_where_a_volume_holds_one(folder, synchronization, expected):
    settings = {"mode": "ParameterServer", "parameterServer": {"synchronization": synchronization}}
    described = JobConfig.model_validate(job(TRAINING, parallelism={"dataParallel": settings}))
    config = Config(described, Mesh(), Batch(16, 1, 16), checkpoint_folder=folder)
    assert resumes_from_snapshots(config) is expected
