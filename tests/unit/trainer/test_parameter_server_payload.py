"""What is pushed of a range, from the worker's gradient to the server's update, as functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.parallelism import Compression, CompressionName, ParameterServer, Pushed, Synchronization
from disttrain_api.training import Optimizer, OptimizerName, Training
from disttrain_trainer.parameter_server.protocol.codec import Piece, build_codec
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.rows import Rows, merged
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message, decode, encode, key_of
from disttrain_trainer.parameter_server.server.aggregation import Aggregator, Push, rate_of
from disttrain_trainer.parameter_server.server.averaging import AveragingShard
from disttrain_trainer.parameter_server.server.push_decoder import PushDecoder
from disttrain_trainer.parameter_server.server.shard import Shard
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from tests.builders import TRAINING

KEY = key_of("token", "uid", 1)
SGD = Optimizer(name=OptimizerName.SGD, learning_rate=1.0)
COMPRESSIONS = {
    "FP16": Compression(name=CompressionName.FP16),
    "BF16": Compression(name=CompressionName.BF16),
    "Int8": Compression(name=CompressionName.INT8),
    "OneBit": Compression(name=CompressionName.ONE_BIT),
    "TopK": Compression(name=CompressionName.TOP_K, ratio=0.2),
    "RandomK": Compression(name=CompressionName.RANDOM_K, ratio=0.2),
    "TopK with momentum": Compression(name=CompressionName.TOP_K, ratio=0.2, momentum_correction=0.5),
}
SIZES = {"a": 300, "b": 7, "c": 41}


class Worker:
    """A worker whose pushes two servers read."""

    def __init__(self, compression, *, weighted=False):
        self.placement = place(SIZES, 2)
        self.parameters = {name: torch.nn.Parameter(torch.zeros(size).double()) for name, size in SIZES.items()}
        code = build_codec(compression, 3)
        momentum = compression.momentum_correction or 0.0
        self.payload = GradientPayload(self.placement, self.parameters, code, momentum, weighted=weighted)
        self.decoders = [PushDecoder(server, compression, 3) for server in range(2)]
        self.shards = [Shard([torch.zeros(one.size).double() for one in ranges], SGD) for ranges in self.placement]

    def push(self, step, fresh=(True, True), weight=1.0):
        """What both servers read of a push of random gradients, and these, as one row of numbers each."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        task = Task(step, 0)
        self.payload.begin(task, weight)
        found = []
        for server, ranges in enumerate(self.placement):
            written = [self.payload.of(server, index) for index in range(len(ranges))]
            fields = {"ranges": list(range(len(ranges))), "counts": [len(tensors) for tensors in written]}
            message = Message("push", fields, [tensor for tensors in written for tensor in tensors])
            sent = decode(encode(message, KEY), KEY)
            read = self.decoders[server].decode(sent, task, self.shards[server])
            found += [read[index] for index in range(len(ranges))]
        self.payload.settle(fresh)
        return torch.cat(found), torch.cat([self.parameters[name].grad for name in sorted(SIZES)])

    def kept(self):
        """What is kept of all numbers, in order."""
        kept = self.payload._kept
        pieces = [
            kept[server, index].residual if (server, index) in kept else torch.zeros(one.size).double()
            for server, ranges in enumerate(self.placement)
            for index, one in enumerate(ranges)
        ]
        return torch.cat(pieces)


@pytest.mark.parametrize("name", ["OneBit", "TopK", "RandomK"])
class TestFeedback:
    def test_sent_and_kept_are_the_gradient_and_what_was_kept(self, name):
        worker = Worker(COMPRESSIONS[name])
        for step in range(4):
            before = worker.kept()
            sent, gradient = worker.push(step)
            torch.testing.assert_close(sent + worker.kept(), gradient + before, rtol=1e-12, atol=1e-12)
        assert worker.kept().norm() > 0

    def test_a_sum_by_weights_loses_nothing_either(self, name):
        worker, sent, gradients = Worker(COMPRESSIONS[name], weighted=True), 0, 0
        for step, weight in enumerate([12.0, 1.0, 0.0, 12.0]):
            found = worker.push(step, weight=weight) if weight else (torch.zeros(348), torch.zeros(348))
            sent, gradients = sent + weight * found[0], gradients + weight * found[1]
        torch.testing.assert_close(sent + worker.kept(), gradients, rtol=1e-12, atol=1e-12)

    def test_who_had_the_task_already_changes_nothing_that_is_kept(self, name):
        worker = Worker(COMPRESSIONS[name])
        worker.push(0)
        before = worker.kept()
        worker.push(1, fresh=(True, False))
        first = sum(one.size for one in worker.placement[0])
        assert torch.equal(worker.kept()[first:], before[first:])
        assert not torch.equal(worker.kept()[:first], before[:first])


def test_momentum_correction_gathers_what_is_not_sent():
    worker = Worker(COMPRESSIONS["TopK with momentum"])
    first = worker.push(0)[1]
    sent = worker.push(1)[0]
    second = torch.cat([worker.parameters[name].grad for name in sorted(SIZES)])
    kept = worker.kept()
    untouched = (worker.push(2)[0] == 0) & (sent == 0) & (kept != 0)
    # v1 = g1, u1 = g1; v2 = v1 / 2 + g2, u2 = u1 + v2, where neither was sent.
    never = untouched & ((1.5 * first + second - kept).abs() < 1e-12)
    assert never.sum() > 100


@pytest.mark.parametrize("name", COMPRESSIONS)
class TestTrust:
    def test_what_was_written_is_read(self, name):
        code, piece = build_codec(COMPRESSIONS[name], 1), Piece(2, 0, 1, 0)
        values = torch.randn(300).double()
        tensors = code.encode(values, piece)
        read = code.decode(tensors, 300, torch.float64, piece)
        assert read.dtype is torch.float64
        close = {"FP16": 1e-3, "BF16": 1e-2, "Int8": 2e-2}.get(name)
        if close is not None:
            torch.testing.assert_close(read, values, rtol=0, atol=4 * close)
        elif name == "OneBit":
            assert torch.equal(read >= 0, values >= 0)
        else:
            assert torch.equal(read[read != 0], values[read != 0])
            assert (read != 0).sum() == 60

    def test_what_does_not_fit_is_malformed(self, name):
        code, piece = build_codec(COMPRESSIONS[name], 1), Piece(2, 0, 1, 0)
        tensors = code.encode(torch.randn(300).double(), piece)
        wrong = [
            [],
            [*tensors, torch.zeros(1)],
            [tensors[0][:-1], *tensors[1:]],
            [tensors[0].to(torch.int64), *tensors[1:]],
        ]
        for given_tensors in wrong:
            with pytest.raises(Malformed, match=r"^a range of tensors"):
                code.decode(given_tensors, 300, torch.float64, piece)
        with pytest.raises(Malformed, match=r"^a range of tensors"):
            code.decode(tensors, 900, torch.float64, piece)


@pytest.mark.parametrize("places", [[0, 1, 300], [-1, 0, 1], [3, 2, 4], [2, 2, 4]])
def test_places_outside_or_twice_are_malformed(places):
    code = build_codec(Compression(name=CompressionName.TOP_K, ratio=0.01), 1)
    with pytest.raises(Malformed, match="ascending"):
        code.decode([torch.ones(3), torch.tensor(places, dtype=torch.int32)], 300, torch.float32, Piece(0, 0, 0, 0))


class TestAveraging:
    TRAINING = Training.model_validate({**TRAINING, "optimizer": {"name": "SGD", "learningRate": 0.1}})

    @pytest.mark.parametrize(
        ("synchronization", "aware", "expected"),
        [
            # Weights 1 and 3.
            ("Sync", None, (1 * 4 + 3 * 8) / 4),
            ("Async", None, (4 + 8) / 2),
            ("Async", True, 4 + 8 / 1),
        ],
    )
    def test_of_the_changes_of_two_workers(self, synchronization, aware, expected):
        described = ParameterServer(
            push=Pushed.PARAMETERS, synchronization=Synchronization(synchronization), staleness_aware_rate=aware
        )
        shard = AveragingShard([torch.zeros(2)], self.TRAINING.optimizer)
        together = synchronization == "Sync"
        taken = Aggregator(
            shard, 2, rate_of(self.TRAINING, described, 2), together=together, staleness_aware=bool(aware)
        )
        taken.take(Push(Task(0, 0), 1.0, {(0, 0): torch.full((2,), 4.0)}, 0, 0))
        taken.take(Push(Task(0, 1), 3.0, {(0, 0): torch.full((2,), 8.0)}, 0, 0))
        assert shard.values()[0].tolist() == [expected, expected]
        assert taken.squares == {}, "no gradient was seen"

    def test_the_optimizers_state_is_averaged_and_kept(self):
        optimizer = Optimizer(name=OptimizerName.ADAM)
        shard = AveragingShard([torch.ones(2), torch.ones(1)], optimizer)
        assert [list(state) for state in shard.optimizer_states()] == [["step", "exp_avg", "exp_avg_sq"]] * 2
        changes = {(0, which): torch.ones(size) for which, size in enumerate([2, 1, 2, 2])}
        shard.update(changes, 0.5)
        first, second = shard.optimizer_states()
        assert [state["step"].tolist() for state in (first, second)] == [[0.5], [0.0]]
        assert first["exp_avg"].tolist() == [0.5, 0.5]
        assert [value.tolist() for value in shard.values()] == [[1.5, 1.5], [1.0]]
        again = AveragingShard(shard.values(), optimizer, shard.optimizer_states())
        assert again.optimizer_states()[0]["step"].tolist() == [0.5]

    def test_a_change_that_lacks_a_tensor_is_malformed(self):
        shard = AveragingShard([torch.ones(2)], Optimizer(name=OptimizerName.ADAM))
        with pytest.raises(Malformed, match=r"^a range of tensors"):
            PushDecoder(0, None, 0).decode(Message("push", {"ranges": [0]}, [torch.ones(2)]), Task(0, 0), shard)


class TestRows:
    def test_rows_are_added_up(self):
        first = merged(torch.tensor([4, 1, 4]), torch.tensor([[1.0], [2.0], [3.0]]))
        both = (first * 2.0).add_(Rows(torch.tensor([0, 1]), torch.tensor([[5.0], [7.0]])))
        assert both.places.tolist() == [0, 1, 4]
        assert both.values.tolist() == [[5.0], [11.0], [8.0]]

    @pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
    def test_touched_rows_are_updated_as_dense_ones_and_others_stay(self, name):
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = Optimizer(name=OptimizerName(name), learning_rate=0.1, weight_decay=0.1, **momentum)
        begin = torch.randn(5 * 3).double()
        table = Shard([begin], optimizer, widths=[3])
        dense = Shard([begin], optimizer)
        places = torch.tensor([1, 4])
        for _ in range(3):
            values = torch.randn(2, 3).double()
            whole = torch.zeros(5, 3).double().index_copy_(0, places, values)
            squares = table.update({0: Rows(places, values)}, 0.1), dense.update({0: whole.view(-1)}, 0.1)
            assert squares[0] == pytest.approx(squares[1])
        found, expected = (shard.values()[0].view(5, 3) for shard in (table, dense))
        assert torch.allclose(found[places], expected[places], rtol=1e-12, atol=0)
        others = torch.tensor([0, 2, 3])
        assert torch.equal(found[others], begin.view(5, 3)[others])
        for key, state in table.optimizer_states()[0].items():
            kept = dense.optimizer_states()[0][key]
            if key != "step":
                state, kept = state.view(5, 3)[places], kept.view(5, 3)[places]
            assert torch.allclose(state, kept, rtol=1e-12, atol=0)


@settings(deadline=None)
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(0, 20), st.integers(1, 6))),
    st.integers(1, 6),
)
def test_rows_stay_whole(tables, servers):
    sizes = {name: rows * width for name, (rows, width) in tables.items()}
    widths = {name: width for name, (_, width) in tables.items()}
    placed = place(sizes, servers, widths)
    assert all(one.start % widths[one.name] == one.size % widths[one.name] == 0 for part in placed for one in part)
    keys = [(one.name, at) for part in placed for one in part for at in range(one.start, one.stop)]
    assert keys == [(name, at) for name in sorted(sizes) for at in range(sizes[name])]
    shares = [sum(one.size for one in part) for part in placed]
    assert max(shares) - min(shares) < 2 * max(widths.values(), default=1)
