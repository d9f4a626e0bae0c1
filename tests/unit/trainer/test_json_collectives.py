"""Small values between ranks: nothing that a rank sends runs code, and what is no value ends the rank in a sentence."""

import math
import os
import pickle
import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from disttrain_trainer.checkpoint.plans import plan_of_json, plan_to_json
from disttrain_trainer.runtime import errors, json_collectives
from disttrain_trainer.runtime.errors import Fenced, PeerLost
from disttrain_trainer.runtime.failures import Failure
from disttrain_trainer.runtime.json_collectives import Form, decode, encode, form_of
from disttrain_trainer.runtime.unpickler import PlainUnpickler
from tests.unit.trainer.worlds import job, run_ranks, small


@dataclass(frozen=True)
class Sample:
    names: set[str]
    number: float
    inner: dict[int, tuple[int, str]]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None),
        ([(1, 2.5), (3, -0.0)], list[tuple[int, float]]),
        (Sample({"a", "b"}, 1.5, {4: (1, "x")}), Sample),
        (form_of(torch.zeros(2, 3, dtype=torch.bfloat16)), Form),
        ((Failure("Fenced", "a sentence"), None), tuple[Failure | None, int | None]),
    ],
)
def test_a_value_arrives_as_it_was(value: Any, kind: Any) -> None:
    assert decode(encode(value, kind), kind) == value


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_arrives_bit_by_bit(number: float) -> None:
    found = decode(encode(number, float), float)
    assert math.isnan(found) if math.isnan(number) else struct.pack("d", found) == struct.pack("d", number)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b'"x"', b'{"a": 1}', pickle.dumps(1), b"\xff\xfe"])
def test_what_is_no_value_of_this_type_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Invalid JSON|should be a valid array"):
        decode(data, list[int])


def test_a_name_that_is_no_text_arrives_readable() -> None:
    """Python stands for the bytes of such file names by halves of characters, which JSON does not know."""
    assert decode(encode("b\udcff.png", str), str) == "b?.png"
    assert decode(encode(Failure.of(FileNotFoundError("b\udcff.png")), Failure), Failure).message == "b?.png"


def test_a_value_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_collectives, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="12 bytes"):
        encode("0123456789", str)
    with pytest.raises(ValueError, match="12 bytes"):
        decode(b'"0123456789"', str)


def test_an_error_keeps_its_class_and_its_number() -> None:
    def travelled(error: BaseException) -> Exception:
        return decode(encode(Failure.of(error), Failure), Failure).error()

    assert isinstance(travelled(Fenced("no")), Fenced)
    assert isinstance(travelled(RuntimeError("Connection reset by peer")), PeerLost)
    full = travelled(OSError(28, "No space left on device"))
    assert isinstance(full, OSError)
    assert full.errno == 28
    assert str(travelled(KeyError("x"))) == "KeyError: 'x'"
    assert type(Failure("os", "x").error()) is RuntimeError, "a name of the module that is no error"


def test_every_error_of_ours_can_travel() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TrainerError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert type(Failure(kind.__name__, "a sentence").error()) is kind


PROPERTIES = TensorProperties(dtype=torch.bfloat16, requires_grad=True)
PLAN = SavePlan(
    [
        WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(12)),
        WriteItem(
            MetadataIndex("model.w", torch.Size([2, 0]), 1),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3])), PROPERTIES, torch.Size([4, 3])
            ),
        ),
    ],
    storage_data=_StoragePrefix("__3_"),
    planner_data={"model.w": ("model", "w"), "step": ("steps", 0)},
)


def test_the_plan_of_a_checkpoint_arrives_as_it_was() -> None:
    own = plan_to_json(PLAN)
    found = plan_of_json(decode(encode(own, type(own)), type(own)))
    assert found == PLAN
    # Equality of an index leaves its hint out.
    assert [item.index.index for item in found.items] == [None, 1]


def test_torch_plans_nothing_that_would_get_lost() -> None:
    """Fields that a later version adds to what travels must be added to checkpoint_plans.py."""
    known = {
        planner.SavePlan: "items storage_data planner_data usable",
        WriteItem: "index type bytes_io_data tensor_data",
        TensorWriteData: "chunk properties size",
        BytesIOWriteData: "nbytes",
        ChunkStorageMetadata: "offsets sizes",
        TensorProperties: "dtype layout requires_grad memory_format pin_memory",
        MetadataIndex: "fqn offset index",
        WriteResult: "index size_in_bytes storage_data",
        _StorageInfo: "relative_path offset length transform_descriptors",
        _StoragePrefix: "prefix",
    }
    for kind, names in known.items():
        assert {field.name for field in fields(kind)} <= set(names.split()), kind


@pytest.mark.parametrize("value", [{"a": [1, 2.5, {"x"}]}, torch.Size([2]), torch.bfloat16, (None, b"x", True)])
def test_plain_data_may_be_unpickled(value: Any, tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_bytes(pickle.dumps(value))
    with file.open("rb") as stream:
        assert PlainUnpickler(stream).load() == value


class Call:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self.function, ("true",)


@pytest.mark.parametrize("function", [os.system, eval, exec, torch.load, torch.hub.load, __import__, pickle.loads])
def test_nothing_else_may(function: Any, tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_bytes(pickle.dumps(Call(function)))
    with file.open("rb") as stream, pytest.raises(pickle.UnpicklingError, match="plain data only"):
        PlainUnpickler(stream).load()


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        ("an object", "UnpicklingError: a rank has sent an object that needs posix.system"),
        ("a pickle", "PeerLost: rank 1 does not speak as one of this job: it sent no <class 'int'>: Invalid JSON"),
        ("another type", "PeerLost: rank 1 does not speak as one of this job: it sent no <class 'int'>"),
        ("a deep value", "PeerLost: rank 1 does not speak as one of this job: it sent no <class 'list'>"),
        ("a length", f"PeerLost: rank 1 does not speak as one of this job: it sent a value of {2**40} bytes\n"),
        ("a large share", "PeerLost: rank 1 does not speak as one of this job: it sent a value of 600 bytes, which"),
        (
            "a large share for the first",
            "PeerLost: rank 1 does not speak as one of this job: it sent a value of 1001 bytes, which with",
        ),
        ("a negative length", "PeerLost: rank 1 does not speak as one of this job: it sent a value of -1 bytes\n"),
        ("a plan", "PeerLost: rank 1 does not speak as one of this job: it sent no tuple"),
    ],
)
def test_a_hostile_rank_runs_no_code_in_another(tmp_path: Path, attack: str, sentence: str) -> None:
    """Red where any class may be named, and without any of the bounds on bytes."""
    victim, _ = run_ranks(tmp_path, job(small()), ranks=2, module="tests.unit.trainer.hostile_ranks", ATTACK=attack)
    assert victim.out.startswith(sentence), victim.out + victim.err
    assert not (tmp_path / "code-has-run").exists()


def test_what_all_send_to_the_first_is_bounded_by_what_it_sends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where the longest of all values is the measure."""
    monkeypatch.setattr(json_collectives, "MAX_BYTES_OF_ALL", 1000)
    assert json_collectives.most_of_all([10, 10]) == 1000, "little is always taken"
    assert json_collectives.most_of_all([400] * 1000) == json_collectives.TIMES_AS_MUCH * 400_000, "a large job's plans"
    assert json_collectives.most_of_all([10, *[10**6] * 99]) == json_collectives.TIMES_AS_MUCH * 1000
