"""Checkpoints made by a stranger: nothing of them is run, none costs more than itself, and each is named."""

import pickle
import pickletools
import shutil
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from disttrain.main import main
from disttrain_api.names import ExitCode
from disttrain_trainer.checkpoint.metadata_file import metadata_of
from disttrain_trainer.checkpoint.metadata_parts import NotMetadata
from disttrain_trainer.checkpoint.verify import lone_flaw_of
from tests.suites import examples
from tests.unit.trainer.hostile import HOSTILE, METADATA_FILE, Runs, as_value, metadata_in, write_metadata
from tests.unit.trainer.limited import outcome
from tests.unit.trainer.pickle_bombs import BOMBS, assembled, text
from tests.unit.trainer.test_checkpoint import run
from tests.unit.trainer.worlds import run_cases, small

TRAINING = small(steps=4, checkpoint={"interval": 2, "keepLatest": 3}, logging={"interval": 1})
LONGER = {**TRAINING, "steps": 5}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Steps 2 and 4 of one rank."""
    storage = tmp_path_factory.mktemp("written")
    assert [rank.code for rank in run(storage / "run", TRAINING, storage)] == [ExitCode.DONE]
    return storage / "test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def results(written, folder):
    """For each kind of harm: a job that goes on from it, with and without an older checkpoint, and one that begins with
    its weights."""
    cases = {}
    for number, (spoil, _) in enumerate([*HOSTILE.values(), (as_value, "")]):
        for kind in ("alone", "older", "weights"):
            place = folder / f"{kind}-{number}" / "test"
            shutil.copytree(written, place)
            spoil(place / "step-4", folder / f"{kind}-{number}" / "mark")
            if kind != "older":
                shutil.rmtree(place / "step-2")
            training = LONGER
            if kind == "weights":
                place.rename(place.with_name("foreign"))
                training = {**LONGER, "checkpoint": {"initialFrom": "foreign"}}
            cases[f"{kind}-{number}"] = [{"training": training}]
    return run_cases(folder, 1, cases)


class TestHostile:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_where_it_is_all_there_is_the_job_ends_with_a_sentence(self, results, name):
        (error,) = results[f"alone-{list(HOSTILE).index(name)}"]["errors"]
        assert error.startswith("CheckpointBroken: no checkpoint in")
        assert HOSTILE[name][1] in error

    @pytest.mark.parametrize("name", HOSTILE)
    def test_the_one_before_is_taken(self, results, folder, name):
        case = f"older-{list(HOSTILE).index(name)}"
        assert results[case]["errors"] == [None]
        assert (folder / case / "test" / "step-5").is_dir()
        assert not (folder / case / "test" / "step-4.broken").exists(), "its step was reached again"

    @pytest.mark.parametrize("name", HOSTILE)
    def test_its_weights_are_refused(self, results, name):
        (error,) = results[f"weights-{list(HOSTILE).index(name)}"]["errors"]
        assert error.startswith("CheckpointBroken: `training.checkpoint.initialFrom`: ")
        assert HOSTILE[name][1] in error

    @pytest.mark.parametrize("name", HOSTILE)
    def test_it_is_not_exported(self, written, tmp_path, capfd, name):
        spoil, sentence = HOSTILE[name]
        shutil.copytree(written / "step-4", tmp_path / "step-4")
        spoil(tmp_path / "step-4", tmp_path / "mark")
        assert main(["export", str(tmp_path / "step-4"), str(tmp_path / "out.safetensors")]) == 1
        assert sentence in capfd.readouterr().err
        assert not (tmp_path / "mark").exists()
        assert not (tmp_path / "out.safetensors").exists()

    @pytest.mark.parametrize("name", HOSTILE)
    def test_it_is_found_before_anything_is_loaded(self, written, tmp_path, name):
        """Red where a file that is a hole is opened like others."""
        spoil, sentence = HOSTILE[name]
        shutil.copytree(written / "step-4", tmp_path / "step-4")
        spoil(tmp_path / "step-4", tmp_path / "mark")
        flaw = lone_flaw_of(tmp_path / "step-4")
        assert flaw is not None
        assert sentence in flaw

    def test_a_value_that_is_a_call_is_refused_when_it_is_loaded(self, results):
        (error,) = results[f"alone-{len(HOSTILE)}"]["errors"]
        assert error.startswith("CheckpointBroken: ")
        assert "step-4: `train.epoch` holds `posix.mkdir`, expected plain values and tensors" in error

    def test_one_that_has_numpys_state_in_an_array_goes_on_without_it(self, written, tmp_path):
        """As earlier versions wrote it."""
        shutil.copytree(written, tmp_path / "old" / "test")
        step = tmp_path / "old" / "test" / "step-4"
        metadata = metadata_in(step)
        del metadata.state_dict_metadata["random.0.numpy_generator"]
        write_metadata(step, metadata)
        result = run_cases(tmp_path, 1, {"old": [{"training": LONGER}]})["old"]
        assert result["errors"] == [None]
        assert [line["step"] for line in result["metrics"] if "lr" in line] == [1, 2, 3, 4, 5]

    def test_nothing_is_run(self, results, folder):
        """Red where pickle may load values, and where `.metadata` may call what it names."""
        assert list(folder.glob("*/mark")) == []

    def test_the_calls_would_be_run_by_pickle(self, tmp_path):
        """Without which the tests above would say nothing."""
        pickle.loads(pickle.dumps(Runs(tmp_path / "mark")))
        assert (tmp_path / "mark").is_dir()


class TestMetadataFile:
    @pytest.mark.parametrize("name", BOMBS)
    def test_what_is_no_metadata_is_refused_with_a_sentence(self, name):
        """Red without the bound on what is made, and where what is named again costs nothing."""
        data, sentence = BOMBS[name]
        message = outcome(metadata_of, data)
        assert message.startswith(f"NotMetadata: {sentence}")
        assert len(message) < 400

    def test_what_is_named_again_costs_what_it_is(self):
        """Up to a bound that a file of a thousand bytes has, and one of ten has not."""
        few = assembled(text("a" * 1000), b"\x94(", b"h\x00" * 50, b"t")
        assert outcome(metadata_of, few) == "NotMetadata: an object of type tuple"

    @pytest.mark.parametrize("protocol", [4, 5])
    def test_every_protocol_that_python_writes_reads_alike(self, written, protocol):
        expected = metadata_in(written / "step-4")
        found = metadata_of(pickle.dumps(expected, protocol))
        assert found.state_dict_metadata == expected.state_dict_metadata
        assert found.storage_data == expected.storage_data

    def test_a_memory_format_reads_alike_however_python_writes_it(self, written, monkeypatch):
        """Since 3.12 by its number."""
        from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

        expected = metadata_in(written / "step-4")
        by_number = lambda self, _: (type(self), (self.value,))  # noqa: E731
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_number)
        data = pickle.dumps(expected)
        assert b"getattr" not in data
        assert metadata_of(data).state_dict_metadata == expected.state_dict_metadata

    def test_several_dimensions_and_parts_of_all_number_formats(self):
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

        formats = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
        entries = {
            f"model.{number}": TensorStorageMetadata(
                TensorProperties(dtype),
                torch.Size([70_000, 2]),
                [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([35_000, 2])) for at in (0, 35_000)],
            )
            for number, dtype in enumerate(formats)
        }
        places = {
            MetadataIndex(name, [at, 0], at): _StorageInfo(f"__{at}_0.distcp", 2**40 + at, 2**33)
            for name in entries
            for at in (0, 35_000)
        }
        found = metadata_of(pickle.dumps(Metadata(entries, {}, places)))
        assert (found.state_dict_metadata, found.storage_data) == (entries, places)

    @settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_change_is_read_or_refused(self, written, data):
        """Bytes flipped, cut out, repeated: nothing but a Metadata or a sentence comes of it."""
        content = bytearray((written / "step-4" / METADATA_FILE).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            until = at + data.draw(st.integers(0, 20))
            content[at:until] = data.draw(st.one_of(st.binary(max_size=4), st.just(bytes(content[at:until]) * 2)))
            if not content:
                break
        with suppress(NotMetadata):
            assert type(metadata_of(bytes(content))) is Metadata

    @settings(max_examples=examples(300), deadline=None)
    @given(st.lists(st.sampled_from(sorted(opcode.code for opcode in pickletools.opcodes)), max_size=40))
    def test_any_instructions_are_refused_or_harmless(self, codes):
        with suppress(NotMetadata):
            assert type(metadata_of("".join(codes).encode("latin-1"))) is Metadata
