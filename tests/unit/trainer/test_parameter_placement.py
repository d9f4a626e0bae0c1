"""Where parameters lie, how messages look on the wire, and who works on what: what holds for all inputs."""

import hmac

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Synchronization
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.tasks import Result, Verdict
from disttrain_trainer.parameter_server.protocol.wire import (
    FORMATS,
    FRAME_BYTES,
    Malformed,
    Message,
    decode,
    encode,
    key_of,
)
from disttrain_trainer.parameter_server.server.scheduler import Assignment, TaskScheduler

KEY = key_of("token", "uid", 1)
# A busy machine is no failure.
UNHURRIED = settings(deadline=None)

sizes = st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.integers(0, 50), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
tensors = st.builds(
    lambda name, length: torch.randn(length).to(FORMATS[name]), st.sampled_from(sorted(FORMATS)), st.integers(0, 20)
)
messages = st.builds(
    Message,
    st.text(max_size=5),
    st.dictionaries(st.text(max_size=3), json_values, max_size=3),
    st.lists(tensors, max_size=3),
)


class TestPlacement:
    @UNHURRIED
    @given(sizes, st.integers(1, 8))
    def test_every_number_lies_on_one_server_and_shares_are_equal(self, sizes, servers):
        placed = place(sizes, servers)
        keys = [(one.name, at) for segments in placed for one in segments for at in range(one.start, one.stop)]
        assert keys == [(name, at) for name in sorted(sizes) for at in range(sizes[name])]
        shares = [sum(one.size for one in segments) for segments in placed]
        assert len(placed) == servers
        assert max(shares) - min(shares) <= 1

    @UNHURRIED
    @given(sizes, st.integers(1, 8), st.randoms())
    def test_the_order_in_which_parameters_are_given_does_not_count(self, sizes, servers, chance):
        shuffled = list(sizes.items())
        chance.shuffle(shuffled)
        assert place(dict(shuffled), servers) == place(sizes, servers)

    def test_no_servers(self):
        with pytest.raises(ValueError, match="0 servers"):
            place({"a": 1}, 0)


class TestWire:
    @UNHURRIED
    @given(messages)
    def test_what_is_sent_arrives(self, message):
        found = decode([bytes(frame) for frame in encode(message, KEY)], KEY)
        assert (found.kind, found.fields) == (message.kind, message.fields)
        assert [tensor.dtype for tensor in found.tensors] == [tensor.dtype for tensor in message.tensors]
        assert all(torch.equal(one, other) for one, other in zip(found.tensors, message.tensors, strict=True))

    def test_tensors_are_not_copied(self):
        tensor = torch.zeros(4)
        frames = encode(Message("push", tensors=[tensor]), KEY)
        received = bytearray(frames[2])
        found = decode([*frames[:2], received], KEY).tensors[0]
        tensor[0] = 1.0
        assert bytes(frames[2])[:4] == tensor[:1].numpy().tobytes()
        received[0:4] = tensor[:1].numpy().tobytes()
        assert found[0] == 1.0

    @pytest.mark.parametrize("numbers", [0, 1, FRAME_BYTES // 4, FRAME_BYTES // 4 + 1, FRAME_BYTES])
    def test_no_frame_is_longer_than_a_connection_takes(self, numbers):
        tensors = [torch.arange(numbers, dtype=torch.float32), torch.ones(3)]
        message = Message("push", {"names": ["x" * 100] * 5000}, tensors)
        frames = encode(message, KEY)
        assert max(memoryview(frame).nbytes for frame in frames) <= FRAME_BYTES
        found = decode([bytes(frame) for frame in frames], KEY)
        assert found.fields == message.fields
        assert all(torch.equal(one, other) for one, other in zip(found.tensors, tensors, strict=True))

    @UNHURRIED
    @given(messages, st.data())
    def test_nothing_but_what_was_sent_is_believed(self, message, data):
        """One byte of code or header changed, a frame more or less, a tensor cut: Malformed, and nothing else.

        Red without the comparison of the code, without that of the lengths, and without that of the number of frames.
        """
        frames = [bytearray(frame) for frame in encode(message, KEY)]
        match data.draw(st.sampled_from(["code", "length", "header", "first", "drop", "add", "cut"])):
            case "code":
                frames[0][data.draw(st.integers(0, 31))] ^= data.draw(st.integers(1, 255))
                why = "^not authenticated"
            case "length":
                frames[0][data.draw(st.integers(32, 35))] ^= data.draw(st.integers(1, 255))
                why = "^(a header of [0-9]+ bytes|[0-9]+ (bytes|frames), the header says)"
            case "header":
                frames[1][data.draw(st.integers(0, len(frames[1]) - 1))] ^= data.draw(st.integers(1, 255))
                why = "^not authenticated"
            case "first":
                frames.pop(0)
                why = "bytes in the first frame"
            case "drop":
                frames.pop(data.draw(st.integers(2, len(frames) - 1)) if len(frames) > 2 else 1)
                why = "^[0-9]+ (bytes|frames), the header says"
            case "add":
                frames.append(bytearray(8))
                why = "^more frames than the header says"
            case "cut":
                frames[-1] += b"x"
                why = "^[0-9]+ bytes, the header says"
        with pytest.raises(Malformed, match=why):
            decode([bytes(frame) for frame in frames], KEY)

    @UNHURRIED
    @given(st.lists(st.binary(max_size=40), max_size=4))
    def test_noise_is_malformed(self, frames):
        first = frames[0] if frames else b""
        why = (
            "^[0-9]+ bytes in the first frame"
            if len(first) != 36
            else "^a header of|the header says|^not authenticated"
        )
        with pytest.raises(Malformed, match=why):
            decode(frames, KEY)

    @UNHURRIED
    @given(st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=200))
    def test_noise_of_the_right_lengths_is_not_authenticated(self, code, header):
        """Red without the comparison of the code: then it would be parsed."""
        with pytest.raises(Malformed, match=r"^not authenticated"):
            decode([code + len(header).to_bytes(4, "big"), header], KEY)

    @pytest.mark.parametrize("length", [0, 16 * 2**20 + 1, 2**32 - 1])
    def test_a_header_that_is_none_or_too_long_is_not_looked_for(self, length):
        """Red without the bound on its length."""
        with pytest.raises(Malformed, match=f"a header of {length} bytes"):
            decode([bytes(32) + length.to_bytes(4, "big"), b"x"], KEY)

    def test_the_frame_of_an_empty_tensor_counts(self):
        """Red where frames are counted by their bytes alone."""
        frames = encode(Message("push", tensors=[torch.zeros(0)]), KEY)
        with pytest.raises(Malformed, match="0 frames, the header says 1"):
            decode(frames[:2], KEY)

    @pytest.mark.parametrize(
        ("header", "why"),
        [
            (b"{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"[]", "not an object"),
            (b'{"kind": 1, "fields": {}, "tensors": []}', "lacks its kind, fields or tensors"),
            (b'{"kind": "a", "fields": [], "tensors": []}', "lacks its kind, fields or tensors"),
            (b'{"kind": "a", "fields": {}}', "lacks its kind, fields or tensors"),
            (b'{"kind": "a", "fields": {}, "tensors": [["float8", 1]]}', "no known format"),
            (b'{"kind": "a", "fields": {}, "tensors": [["int8"]]}', "no known format"),
            (b'{"kind": "a", "fields": {}, "tensors": [["int8", -1]]}', "no length"),
            (b'{"kind": "a", "fields": {}, "tensors": [["int8", true]]}', "no length"),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_a_header_of_the_jobs_own_that_is_none_is_malformed(self, header, why):
        """Red without the guard that each reason belongs to."""
        code = hmac.digest(KEY, header, "sha256")
        with pytest.raises(Malformed, match=why):
            decode([code + len(header).to_bytes(4, "big"), header], KEY)

    @pytest.mark.parametrize("other", [key_of("other", "uid", 1), key_of("token", "uid", 2), key_of("token", "id", 1)])
    def test_another_token_job_or_attempt_is_not_listened_to(self, other):
        with pytest.raises(Malformed, match="not authenticated"):
            decode(encode(Message("pull"), other), KEY)

    @pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, [1]])
    def test_a_field_of_another_type_is_malformed(self, value):
        with pytest.raises(Malformed, match="`step` of next"):
            Message("next", {"step": value}).number("step")


def nine_steps(synchronization, staleness=0):
    """The tasks of two workers, begun."""
    tasks = TaskScheduler(2, 9, synchronization, staleness, 5.0)
    tasks.start(Sampler(90, 0, Batch(2, 1, 4), 2), 0, Cursor(), 9, 0.0)
    return tasks


class TestTasks:
    def test_in_sync_each_worker_gets_a_part_before_anyone_gets_two(self):
        tasks = TaskScheduler(2, 3, Synchronization.SYNC, 0, 5.0)
        tasks.start(Sampler(9, 0, Batch(2, 1, 4), 2), 0, Cursor(), 3, 0.0)
        tasks.ask(1, 0.0)
        [(_, first)] = tasks.answers()
        tasks.complete(1, first.task, Result(0.0, 1.0, 1.0))
        tasks.ask(1, 0.0)
        assert tasks.answers() == []
        tasks.leave(0)
        [(worker, second)] = tasks.answers()
        assert (worker, second.task) == (1, (0, 1))

    def test_who_comes_back_holds_nobody_up(self):
        tasks = nine_steps(Synchronization.BOUNDED_STALENESS, staleness=1)
        tasks.expire(6.0)
        for _ in range(4):
            tasks.ask(0, 6.0)
            [(_, lease)] = tasks.answers()
            tasks.complete(0, lease.task, Result(0.0, 1.0, 1.0))
        tasks.join(1, 7.0)
        assert tasks.live_clocks == {0: 4, 1: 4}

    def test_what_a_former_life_has_asked_for_or_was_lent_is_forgotten(self):
        tasks = nine_steps(Synchronization.ASYNC)
        tasks.ask(1, 0.0)
        tasks.join(1, 1.0)
        assert tasks.answers() == []
        tasks.ask(1, 1.0)
        [(_, lost)] = tasks.answers()
        tasks.join(1, 2.0)
        tasks.ask(0, 2.0)
        [(_, again)] = tasks.answers()
        assert again.task == lost.task

    def test_a_stop_ends_at_the_next_whole_step(self):
        tasks = nine_steps(Synchronization.ASYNC)
        tasks.ask(0, 0.0)
        [(_, first)] = tasks.answers()
        tasks.stop()
        tasks.complete(0, first.task, Result(0.0, 1.0, 1.0))
        tasks.ask(0, 0.0)
        [(_, second)] = tasks.answers()
        assert (first.task, second.task) == ((0, 0), (0, 1))
        tasks.complete(0, second.task, Result(0.0, 1.0, 1.0))
        tasks.ask(1, 0.0)
        tasks.ask(0, 0.0)
        assert tasks.answers() == [(1, Verdict.STOP), (0, Verdict.HOLD)]

    def test_a_worker_that_is_asked_to_stop_leaves_alone(self):
        tasks = nine_steps(Synchronization.ASYNC)
        tasks.stop(1)
        tasks.ask(1, 0.0)
        tasks.ask(0, 0.0)
        assert [(worker, type(answer)) for worker, answer in tasks.answers()] == [(1, Verdict), (0, Assignment)]
        tasks.join(1, 1.0)
        tasks.ask(1, 1.0)
        assert [(worker, type(answer)) for worker, answer in tasks.answers()] == [(1, Assignment)]

    def test_a_leader_that_is_asked_to_stop_is_waited_for(self):
        tasks = nine_steps(Synchronization.ASYNC)
        tasks.stop(0)
        tasks.ask(1, 0.0)
        tasks.ask(0, 0.0)
        assert tasks.answers() == [(0, Verdict.HOLD)]
        tasks.leave(0)
        tasks.join(0, 1.0)
        tasks.ask(0, 1.0)
        assert tasks.answers() == [(0, Verdict.HOLD)]
        tasks.release(9)
        assert [(worker, type(answer)) for worker, answer in tasks.answers()] == [(1, Assignment)]
