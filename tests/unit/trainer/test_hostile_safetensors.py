"""Files of weights that are damaged or made by a stranger: each ends the job with a sentence that names the file."""

import json
import struct

import pytest
from safetensors.torch import load_file

from disttrain.main import main
from disttrain_api.names import ExitCode
from disttrain_trainer.checkpoint.safetensors_file import MAX_HEADER_BYTES, read_tensors
from disttrain_trainer.runtime.errors import CheckpointBroken
from tests.unit.trainer.limited import outcome
from tests.unit.trainer.test_checkpoint import run
from tests.unit.trainer.worlds import run_cases, small

TRAINING = small(steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def written(folder):
    """A checkpoint, and the file of its weights."""
    storage = folder / "written"
    assert [rank.code for rank in run(folder / "run", TRAINING, storage)] == [ExitCode.DONE]
    assert main(["export", str(storage / "test" / "step-2"), str(folder / "sound.safetensors")]) == 0
    return storage / "test" / "step-2", folder / "sound.safetensors"


def parts_of(file):
    """Its header and its data."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin=0, end=4, shape=(1,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def sparse(path, content, size):
    """No byte of the rest takes room on the disk."""
    path.write_bytes(content)
    with path.open("r+b") as file:
        file.truncate(size)


ONE = b"\0" * 4
HARMS = {
    "nothing": (b"", "has 0 bytes, expected at least 10"),
    "half a length": (b"\0\1\2", "has 3 bytes, expected at least 10"),
    "a header beyond the file": (struct.pack("<Q", 999) + b"{}", "begins with a header of 999 bytes, 2 follow"),
    "the longest header": (struct.pack("<Q", 2**64 - 1) + b"{}", "begins with a header of 18446744073709551615 bytes"),
    "something else": (b"<html>not found</html>", "begins with a header of 8029423821061908540 bytes, 14 follow"),
    "a header that is no JSON": (file_of(b"{nothing}"), "is no JSON: \\'n\\' at character 1, expected \""),
    "a header that is no text": (file_of(b'{"\xff": 1}'), "is no JSON: 'utf-8' codec can't decode byte 0xff"),
    "a header of another kind": (file_of(b"[1, 2, 3]"), "has a header that is no JSON object"),
    "deep JSON": (
        file_of(b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
        "is no JSON: an entry of more than 4096 characters at character 5",
    ),
    "many values": (
        file_of(b'{"a":[' + b",".join([b"{}"] * 8_000_000) + b"]}"),
        "is no JSON: an entry of more than 4096 characters at character 5",
    ),
    "many values in its notes": (
        file_of(b'{"__metadata__":[' + b",".join([b"{}"] * 8_000_000) + b"]}"), "`__metadata__` is no object",
    ),
    "many values in a note": (
        file_of(b'{"__metadata__":{"DCP_SHARDING_INFO":"{\\"a\\":[' + b",".join([b"{}"] * 8_000_000) + b']}"}}'),
        "cannot be read, expected where each tensor begins: an entry of more than 4096 characters at character 5",
    ),
    "many names": (
        file_of(b'{"a":{' + b",".join(b'"%x":1' % number for number in range(2_000_000)) + b"}}"),
        "is no JSON: an entry of more than 4096 characters at character 5",
    ),
    "half an entry": (file_of(b'{"a":{"dtype":'), "is no JSON: something else than a value in 4096 characters"),
    "an end too early": (file_of(b'{"a":{}'), "`a` is described by `{}`"),
    "more after the end": (file_of(b'{}{}'), "is no JSON: more after its end at character 2"),
    "a tensor twice": (
        file_of(b'{"a":' + json.dumps(tensor()).encode() + b',"a":' + json.dumps(tensor()).encode() + b"}", ONE),
        "`a` is in its header twice",
    ),
    "half a surrogate": (file_of(b'{"\\ud800": 1}'), "is no JSON: a text that is none at character 1"),
    "a number that is none": (file_of(b'{"a": {"shape": [NaN]}}'), "is no JSON: the number NaN at character 6"),
    "no tensor": (file_of({"a": 3}), "`a` is described by `3`, expected dtype, shape and data_offsets"),
    "no offsets": (
        file_of({"a": {"dtype": "F32", "shape": [1]}}),
        "`a` is described by `{'dtype': 'F32', 'shape': [1]}`, expected",
    ),
    "three offsets": (
        file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1, 2]}}), "[0, 1, 2]}`, expected dtype",
    ),
    "an unknown type": (file_of({"a": tensor(dtype="X99")}, ONE), "`a` has dtype 'X99', expected one of BF16, BOOL"),
    "a type that is none": (file_of({"a": tensor(dtype=[])}, ONE), "`a` is described by `{'dtype': [], "),
    "offsets beyond the file": (file_of({"a": tensor(0, 8, (2,))}, ONE), "`a` lies at bytes 0 to 8, 4 are there"),
    "offsets backwards": (file_of({"a": tensor(4, 0)}, ONE), "`a` lies at bytes 4 to 0"),
    "offsets below 0": (file_of({"a": tensor(-4, 0)}, ONE), "[-4, 0]}`, expected dtype, shape and"),
    "true for a number": (file_of({"a": tensor(shape=(True,))}, ONE), "[True], 'data_offsets': "),
    "a fraction": (file_of({"a": tensor(shape=(1.5,))}, ONE), "[1.5], 'data_offsets': "),
    "a negative size": (file_of({"a": tensor(shape=(-1, -1))}, ONE), "[-1, -1], 'data_offsets': "),
    "overlapping": (file_of({"a": tensor(), "b": tensor()}, ONE), "`b` begins at byte 0, expected 4"),
    "a hole": (file_of({"a": tensor(4, 8)}, ONE * 2), "`a` begins at byte 4, expected 0"),
    "bytes of nobody": (file_of({"a": tensor()}, ONE * 3), "12 bytes of data, its tensors have 4"),
    "too few bytes for a shape": (file_of({"a": tensor(shape=(2,))}, ONE), "`a` has 4 bytes, its shape [2] needs 8"),
    "a shape beyond all numbers": (
        file_of({"a": tensor(shape=(2**32, 2**32))}, ONE),
        "`a` has 4 bytes, its shape [4294967296, 4294967296] needs 73786976294838206464",
    ),
    "a size beyond all numbers": (file_of({"a": tensor(0, 0, shape=(0, 2**63))}), "[0, 9223372036854775808], "),
    "too many dimensions": (file_of({"a": tensor(shape=[1] * 65)}, ONE), "`a` has 65 dimensions, expected at most 64"),
    "notes that are none": (file_of({"__metadata__": {"a": 1}}), "`a` in `__metadata__` is no text"),
    "a part of a sharded checkpoint": (
        file_of({"__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [4]}}'}, "a": tensor()}, ONE),
        "holds a part of `a`, expected all of it",
    ),
    "notes of shards that are none": (
        file_of({"__metadata__": {"DCP_SHARDING_INFO": "[" * 100_000}, "a": tensor()}, ONE),
        "has a `DCP_SHARDING_INFO` that cannot be read, expected where each tensor begins: '[' at character 0",
    ),
    "notes of shards without places": (
        file_of({"__metadata__": {"DCP_SHARDING_INFO": '{"a": {}}'}, "a": tensor()}, ONE),
        "cannot be read, expected where each tensor begins: 'saved_offsets'",
    ),
    "an odd name": (
        file_of({"0.weight\n\x1b[2J" + "x" * 5_000: tensor(4, 0)}, ONE),
        "`0.weight\\n\\x1b[2Jxxx",
    ),
}  # fmt: skip
"""What the file holds, and what is said about it."""


class TestHeader:
    @pytest.mark.parametrize("name", HARMS)
    def test_what_is_wrong_is_reported_in_one_sentence(self, tmp_path, name):
        """Red without the check that each sentence belongs to."""
        content, sentence = HARMS[name]
        file = tmp_path / "one.safetensors"
        file.write_bytes(content)
        if len(content) > 2**20:
            kind, _, message = outcome(read_tensors, file).partition(": ")
            assert kind == "CheckpointBroken"
        else:
            with pytest.raises(CheckpointBroken) as caught:
                read_tensors(file)
            message = str(caught.value)
        assert message.startswith(f"{file} ")
        assert sentence in message
        assert len(message) < len(str(file)) + 1000
        assert message.isprintable()

    def test_a_header_larger_than_any_is_not_read(self, tmp_path):
        """Red without the bound on its length."""
        file = tmp_path / "one.safetensors"
        sparse(file, struct.pack("<Q", 2**30) + b"{", 2**33)
        with pytest.raises(CheckpointBroken, match=f"header of 1073741824 bytes, expected at most {MAX_HEADER_BYTES}"):
            read_tensors(file)

    @pytest.mark.parametrize("size", [2**20, 2**34])
    def test_what_is_a_hole_is_not_read(self, tmp_path, size):
        """A file of a kilobyte on the disk, whose one tensor has all that it seems to have. Red where what is stored of
        the file is not looked at."""
        file = tmp_path / "one.safetensors"
        header = file_of({"a": tensor(0, size, (size // 4,))})
        sparse(file, header, len(header) + size)
        with pytest.raises(CheckpointBroken, match=f"it has {len(header) + size} bytes, of which [0-9]+ are stored"):
            read_tensors(file)

    def test_zeros_that_a_disk_leaves_out_are_read(self, tmp_path):
        """Nine of ten bytes; some disks do so by themselves."""
        file = tmp_path / "one.safetensors"
        header = file_of({"a": tensor(0, 2**24, (2**22,))})
        sparse(file, header + b"x" * (2**24 // 10), len(header) + 2**24)
        assert list(read_tensors(file)) == ["a"]

    def test_what_safetensors_writes_is_read(self, written):
        found = read_tensors(written[1])
        expected = load_file(written[1])
        assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
            name: (one.dtype, tuple(one.shape)) for name, one in expected.items()
        }

    def test_tensors_without_elements_may_lie_anywhere_between_others(self, tmp_path):
        file = tmp_path / "one.safetensors"
        header = {"a": tensor(), "b": tensor(4, 4, (0, 7)), "c": tensor(4, 8, ()), "d": tensor(8, 8, (0,))}
        file.write_bytes(file_of(header, ONE * 2))
        assert sorted(read_tensors(file)) == ["a", "b", "c", "d"]


# A job is run with each of these: the whole way from a file to the end of its ranks.
RUN = ["nothing", "the longest header", "deep JSON", "offsets beyond the file", "overlapping", "an unknown type",
       "a part of a sharded checkpoint"]  # fmt: skip


@pytest.fixture(scope="module")
def results(folder, written):
    header, data = parts_of(written[1])
    more = tensor(len(data), len(data) + 4)
    files = {
        **{f"{name}.safetensors": HARMS[name][0] for name in RUN},
        "truncated.safetensors": written[1].read_bytes()[:-8],
        "strange.safetensors": file_of({**header, "\x1b[2J" + "x" * 9_000: more}, data + ONE),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder.safetensors").mkdir()
    (folder / "hub").mkdir()
    (folder / "hub" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    (folder / "hub.safetensors").symlink_to(written[1])
    places = {name: name for name in (*files, "folder.safetensors", "hub", "hub.safetensors")}
    places["long"] = "x" * 300 + ".safetensors"
    return {
        ranks: run_cases(
            folder / f"ranks-{ranks}",
            ranks,
            {
                name: [{"training": {**TRAINING, "checkpoint": {"initialFrom": f"{folder}/{place}"}}}]
                for name, place in places.items()
            },
        )
        for ranks in (1, 2)
    }


class TestInitialFrom:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("name", RUN)
    def test_a_job_that_begins_with_it_ends_with_a_sentence(self, folder, results, ranks, name):
        (error,) = results[ranks][f"{name}.safetensors"]["errors"]
        assert error.startswith(f"CheckpointBroken: `training.checkpoint.initialFrom`: {folder}/{name}.safetensors ")
        assert HARMS[name][1] in error
        assert error.endswith("; name another file, or write this one again")

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_one_that_was_cut_off_is_refused(self, folder, results, ranks):
        (error,) = results[ranks]["truncated.safetensors"]["errors"]
        assert error.startswith("CheckpointBroken: ")
        assert f"{folder}/truncated.safetensors is cut off or damaged: `" in error
        assert "lies at bytes" in error

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_odd_names_are_reported_in_a_short_line(self, results, ranks):
        (error,) = results[ranks]["strange.safetensors"]["errors"]
        assert "is unknown here" in error
        assert len(error) < 1000
        assert error.isprintable()

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_what_is_no_file_is_refused(self, results, ranks):
        (error,) = results[ranks]["folder.safetensors"]["errors"]
        assert "is neither a .safetensors file" in error
        (error,) = results[ranks]["long"]["errors"]
        assert error.startswith("InvalidConfiguration: ")
        assert "cannot be read: File name too long" in error

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_an_index_leads_nowhere_but_beside_itself(self, results, ranks):
        (error,) = results[ranks]["hub"]["errors"]
        assert error.startswith("CheckpointBroken: ")
        assert "names the file `../../etc/passwd`, expected a .safetensors file beside the index" in error

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_link_to_a_file_is_followed(self, results, ranks):
        """The cache of Hugging Face's Hub is made of them."""
        assert results[ranks]["hub.safetensors"]["errors"] == [None]


class TestExport:
    def export(self, step, capfd):
        out = step.parent / "out.safetensors"
        assert main(["export", str(step), str(out)]) == 1
        assert not out.exists()
        output = capfd.readouterr().err
        assert "Traceback" not in output
        return output

    @pytest.fixture
    def step(self, written, tmp_path):
        """A copy without a manifest, as earlier versions wrote it: nothing vouches for its files."""
        step = tmp_path / "step-2"
        step.mkdir()
        for file in written[0].iterdir():
            (step / file.name).write_bytes(file.read_bytes())
        return step

    def test_data_that_are_a_link_are_not_read(self, step, capfd):
        (step / "manifest.json").unlink()
        (step / "__0_0.distcp").rename(step.parent / "data")
        (step / "__0_0.distcp").symlink_to("../data")
        assert f"{step}/__0_0.distcp cannot be read: it is a symbolic link" in self.export(step, capfd)

    def test_data_that_are_none_end_with_a_sentence(self, step, capfd):
        (step / "manifest.json").unlink()
        size = (step / "__0_0.distcp").stat().st_size
        (step / "__0_0.distcp").write_bytes(b"\xff" * size)
        assert f"{step} cannot be loaded" in self.export(step, capfd)
