"""Weights of transformers models out and in: what `from_pretrained` and peft read computes what was trained."""

import json
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from disttrain.main import main
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.checkpoint.export import StoredModel, _in_format
from disttrain_trainer.checkpoint.safetensors_index import INDEX_FILE, read_files
from disttrain_trainer.checkpoint.safetensors_writer import Described, write_file, write_folder
from disttrain_trainer.models.transformers.config import library_config, reaches
from disttrain_trainer.models.transformers.model import build
from disttrain_trainer.runtime.errors import CheckpointBroken, InvalidConfiguration
from disttrain_trainer.transformers_export import export_model
from tests.builders import a_manifest
from tests.corpora import content_of
from tests.unit.trainer.comparisons import require_same, require_same_bits
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_transformers_layouts import training
from tests.unit.trainer.transformers_code import described, double_transformers
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, job, run_cases, run_ranks, small

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

TIED = {"tie_word_embeddings": True}
LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
GIVEN = TransformersConfig(config=described("llama") | TIED)
PROMPT = torch.arange(8).unsqueeze(0)


def llama(**changes):
    return training("llama", **TIED, **changes)


def beginning_from(path, **changes):
    """A run whose own initialisation is another one than the seed's."""
    return llama(**changes) | {"seed": 9, "checkpoint": {"initialFrom": str(path)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def seeds(folder):
    """What one process has trained, and where its checkpoint is."""
    cases = {"whole": [{"training": llama()}], "adapted": [{"training": llama(lora=LORA)}]}
    found = run_cases(folder / "seeds", 1, cases)
    return {name: (result["parameters"], folder / "seeds" / name / "test" / "step-3") for name, result in found.items()}


@pytest.fixture(scope="module")
def exported(folder, seeds):
    """The model in several files."""
    target = folder / "exported"
    export_model(StoredModel(seeds["whole"][1]), GIVEN, target, most=4000)
    return target


GENERATION = "generation_config.json"
FOLDERS = {
    "whole": ("tokenizer.json", "tokenizer_config.json", GENERATION),
    "words": ("tokenizer.json", "chat_template.jinja", GENERATION),
    "bare": (GENERATION,),
}
WORDS = dict.fromkeys(FOLDERS["words"], "words")
# The model's folder, the kind of data and the folder of their tokenizer; options; which folder's files are copied.
TOKENIZERS = {
    "the model's": (("whole", "chat", "words"), (), dict.fromkeys(FOLDERS["whole"], "whole")),
    "the data's": ((None, "chat", "words"), (), WORDS),
    "the lines'": ((None, "lines", "words"), (), WORDS),
    "the data's beside a model's folder without one": (("bare", "chat", "words"), (), WORDS | {GENERATION: "bare"}),
    "another one": (("whole", "chat", "whole"), ("--tokenizer", "words"), WORDS | {GENERATION: "whole"}),
    "on another machine": (("bare", "lines", "elsewhere"), (), {GENERATION: "bare"}),
}


def logits_of(parameters, **config):
    module = double_transformers("llama", **TIED, **config)
    module.load_state_dict(parameters)
    return module.eval()(PROMPT)


DIES = """
import os, signal, sys
from disttrain.main import main
from disttrain_trainer.checkpoint.export import StoredModel
left, real = iter(range(int(sys.argv[1]))), StoredModel.read

def read(self, name):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, name)

StoredModel.read = read
main(sys.argv[2:])
"""


class TestExport:
    def test_from_pretrained_computes_the_same(self, seeds, exported):
        files = sorted(path.name for path in exported.iterdir())
        assert len(files) > 4
        assert {"config.json", INDEX_FILE} < set(files)
        assert "lm_head.weight" not in json.loads((exported / INDEX_FILE).read_text())["weight_map"]
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
        assert not any(loading_info.values()), loading_info
        assert model.dtype == torch.float64
        assert torch.equal(model(PROMPT).logits, logits_of(seeds["whole"][0]))

    def test_the_command_copies_the_tokenizer(self, seeds, exported, tmp_path, capfd):
        model, target = tmp_path / "model", tmp_path / "out"
        model.mkdir()
        (model / "config.json").write_bytes((exported / "config.json").read_bytes())
        (model / "tokenizer.json").write_text("{}")
        arguments = ["export", str(seeds["whole"][1]), str(target), "--model", str(model)]
        assert main(arguments) == 0
        assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert load_file(target / "model.safetensors").keys() == seeds["whole"][0].keys() - {"lm_head.weight"}
        assert main(arguments) == 1
        assert f"{target} is there already" in capfd.readouterr().err

    @pytest.mark.parametrize("case", TOKENIZERS)
    def test_the_command_copies_the_tokenizer_that_a_manifest_names(self, seeds, exported, tmp_path, capfd, case):
        described_by, options, expected = TOKENIZERS[case]
        for folder, files in FOLDERS.items():
            (tmp_path / folder).mkdir()
            for name in files:
                (tmp_path / folder / name).write_text(folder)
            (tmp_path / folder / "config.json").write_bytes((exported / "config.json").read_bytes())
        model, kind, tokenizer = described_by
        config = {"config": GIVEN.config} if model is None else {"path": str(tmp_path / model)}
        data = {"name": kind, "config": {"path": "texts.jsonl", "tokenizer": str(tmp_path / tokenizer)}}
        job_ = tmp_path / "job.yaml"
        described_model = {"name": "transformers", "config": config}
        job_.write_text(json.dumps(a_manifest(training={"model": described_model, "data": data})))
        arguments = [str(tmp_path / option) if option in FOLDERS else option for option in options]
        target = tmp_path / "out"
        assert main(["export", str(seeds["whole"][1]), str(target), "--model", str(job_), *arguments]) == 0
        others = {path.name: path for path in target.iterdir() if not path.name.endswith(".safetensors")}
        del others["config.json"]
        assert {name: path.read_text() for name, path in others.items()} == expected
        missing = f"no tokenizer was found in {tmp_path / 'bare'}, {tmp_path / 'elsewhere'}: --tokenizer FOLDER"
        assert (missing in capfd.readouterr().err) is ("tokenizer.json" not in expected)

    def test_the_command_says_where_a_manifest_names_no_tokenizer(self, seeds, tmp_path, capfd):
        data = {"name": "synthetic", "config": {"kind": "Tokens", "vocabularySize": 16}}
        path = tmp_path / "job.yaml"
        model = {"name": "transformers", "config": {"config": GIVEN.config}}
        path.write_text(json.dumps(a_manifest(training={"model": model, "data": data})))
        target = tmp_path / "out"
        arguments = ["export", str(seeds["whole"][1]), str(target), "--model", str(path)]
        assert main([*arguments, "--tokenizer", str(tmp_path)]) == 1
        assert f"{tmp_path} has no files of a tokenizer" in capfd.readouterr().err
        assert main(arguments) == 0
        assert "no tokenizer was found: --tokenizer FOLDER copies one" in capfd.readouterr().err
        assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]

    @pytest.mark.parametrize("read", [0, 5])
    def test_killed_amid_an_export_nothing_has_its_name_and_nothing_is_lost(self, seeds, exported, tmp_path, read):
        checkpoint, target = seeds["whole"][1], tmp_path / "out"
        (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
        arguments = ["export", str(checkpoint), str(target), "--model", str(tmp_path)]
        before = content_of(checkpoint)
        killed = subprocess.run([sys.executable, "-c", DIES, str(read), *arguments], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert not target.exists()
        assert main(arguments) == 0
        assert content_of(checkpoint) == before
        found = load_file(target / "model.safetensors")
        whole = {name: value for name, value in seeds["whole"][0].items() if name in found}
        require_same_bits(found, whole)
        assert len(whole) > 10

    def test_an_export_that_fails_leaves_nothing(self, tmp_path):
        def fails(_):
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            write_folder(tmp_path / "out", [Described("a", torch.float32, (2,))], fails, {})
        assert list(tmp_path.iterdir()) == []

    def test_an_export_leaves_alone_what_another_one_writes_beside_it(self, tmp_path):
        """Two pods may export to one volume, and their processes have the same number."""
        tensors, other = [Described("a", torch.float32, (2,))], tmp_path / "out"

        def while_another_writes(name):
            if not other.exists():
                write_folder(other, tensors, lambda _: torch.ones(2), {"config.json": b"{}"})
            return torch.zeros(2)

        with pytest.raises(OSError, match="not empty"):
            write_folder(tmp_path / "out", tensors, while_another_writes, {"config.json": b"{}"})
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]
        assert load_file(other / "model.safetensors")["a"].tolist() == [1, 1]

    @pytest.mark.parametrize("write", [partial(write_folder, beside={}), write_file], ids=["folder", "file"])
    def test_a_number_format_that_files_do_not_know_is_named(self, tmp_path, write):
        tensors = [Described("a", torch.float32, (2,)), Described("turn.by", torch.complex128, (2,))]
        known = "bool, uint8, .*, complex64"
        message = rf"^`turn\.by` is complex128, which safetensors files do not know \(they know {known}\): read the "
        with pytest.raises(InvalidConfiguration, match=message):
            write(tmp_path / "out", tensors, torch.ones)
        assert list(tmp_path.iterdir()) == []


class TestImport:
    @pytest.fixture(scope="class")
    def alone(self, folder, seeds, exported):
        # As earlier versions of the library wrote them; it passes over them.
        older = folder / "older.safetensors"
        rotary = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq": torch.ones(2) for number in range(2)}
        save_file(seeds["whole"][0] | rotary, older)
        cases = {
            "older files": [{"training": beginning_from(older)}],
            "checkpoint": [{"training": beginning_from(seeds["whole"][1])}],
            "files": [{"training": beginning_from(exported)}],
            "adapted": [{"training": beginning_from(exported, lora=LORA)}],
            "deeper": [{"training": beginning_from(exported, num_hidden_layers=3)}],
        }
        return run_cases(folder / "alone", 1, cases)

    @pytest.fixture(scope="class")
    def together(self, folder, exported, asked_for):
        layouts = {"fsdp2": {SHARD: 2}, "tp2": {TENSOR: 2}, "pp2": {PIPELINE: 2}}
        begins = {"files": beginning_from(exported), "adapted": beginning_from(exported, lora=LORA)}
        cases = {
            f"{name}, {begin}": [{"training": described, "parallelism": layout}]
            for name, layout in layouts.items()
            for begin, described in begins.items()
            if begin in asked_for("test_transformers_weights", "begin", layout=name)
        }
        return run_cases(folder / "together", 2, cases)

    @pytest.mark.parametrize("kind", ["files", "older files"])
    def test_files_are_the_checkpoint_bit_by_bit(self, alone, kind):
        found, expected = alone[kind], alone["checkpoint"]
        assert found["errors"] == expected["errors"] == [None]
        for name, value in expected["parameters"].items():
            assert torch.equal(found["parameters"][name], value)

    @pytest.mark.parametrize("begin", ["files", "adapted"])
    @pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
    def test_every_layout_reads_them(self, alone, together, layout, begin):
        found = together[f"{layout}, {begin}"]
        assert found["errors"] == [None]
        require_same(found["parameters"], alone[begin]["parameters"])

    def test_adapters_train_and_nothing_else_does(self, alone, seeds):
        for name, value in alone["adapted"]["parameters"].items():
            if ".lora_" not in name:
                assert torch.equal(value, seeds["whole"][0][name]), name

    def test_another_model_is_refused_by_name(self, alone):
        (error,) = alone["deeper"]["errors"]
        assert "has no parameter `model.layers.2." in error


class TestSequencesBeyondPositions:
    def test_the_log_says_so_and_the_export_takes_as_long_ones(self, tmp_path):
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(a_manifest(training=long_sequences())))
        (rank,) = run_ranks(tmp_path / "run", job(long_sequences()), storage=tmp_path)
        assert rank.code == 0, rank.err
        assert "sequences of 128 tokens are longer than max_position_embeddings of the model's config, which is 64" in (
            rank.out
        )
        checkpoint, target = tmp_path / "test" / "step-1", tmp_path / "exported"
        assert main(["export", str(checkpoint), str(target), "--model", str(path)]) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(target).double()
        assert model.config.max_position_embeddings == 128
        own = double_transformers("llama")
        own.load_state_dict(model.state_dict())
        prompt = torch.arange(128).unsqueeze(0) % 16
        assert torch.equal(own(prompt), model(prompt).logits)

    def test_nothing_is_said_of_sequences_that_fit(self):
        assert double_transformers("llama").notes_for_log() == []

    @pytest.mark.parametrize(("factor", "expected"), [(4.0, 128), (None, 64)])
    def test_an_export_computes_the_same_rotary_embeddings(self, factor, expected):
        """Without a factor they depend on the number of positions."""
        rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 16}
        given = TransformersConfig(config=described("llama") | {"rope_parameters": rotary}, sequence_length=128)
        config = library_config(given)
        config.max_position_embeddings = reaches(config, 128)
        assert config.max_position_embeddings == expected
        name = "self_attn.rotary_emb.inv_freq"
        again = build(TransformersConfig(config=config.to_dict(), sequence_length=8)).model.layers[0]
        assert torch.equal(again.get_buffer(name), build(given).model.layers[0].get_buffer(name))


def long_sequences():
    """A training with twice as many tokens as the model's config has positions."""
    model = {"name": "transformers", "config": {"config": GIVEN.config}}
    data = {"name": "synthetic", "config": {"kind": "Tokens", "vocabularySize": 16, "sequenceLength": 128}}
    return small(model=model, data=data, steps=1, globalBatchSize=32)


class TestAdapters:
    def test_peft_reads_the_adapter_and_merging_changes_nothing(self, seeds, tmp_path):
        peft = pytest.importorskip("peft")
        parameters, checkpoint = seeds["adapted"]
        assert (
            main(["export", str(checkpoint), str(tmp_path / "adapter"), "--model", manifest(tmp_path), "--adapter"])
            == 0
        )
        assert main(["export", str(checkpoint), str(tmp_path / "merged"), "--model", manifest(tmp_path)]) == 0
        base = transformers.AutoModelForCausalLM.from_config(library_config(GIVEN)).double()
        base.load_state_dict({name: value for name, value in parameters.items() if ".lora_" not in name})
        unadapted = base(PROMPT).logits
        found = (
            peft.PeftModel.from_pretrained(base, tmp_path / "adapter", torch_device="cpu")
            .double()
            .eval()(PROMPT)
            .logits
        )
        expected = logits_of(parameters, lora=LORA)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert (found - unadapted).abs().max() > 1e-3
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(PROMPT).logits, expected, rtol=1e-12, atol=1e-12)

    def test_without_their_description_they_are_not_left_out(self, seeds, tmp_path):
        with pytest.raises(InvalidConfiguration, match="has adapters: give the manifest"):
            export_model(StoredModel(seeds["adapted"][1]), GIVEN, tmp_path / "out")


def manifest(folder):
    """The job that the adapters were trained by, as `disttrain` reads it."""
    model = {"name": "transformers", "config": {"config": GIVEN.config, "lora": LORA}}
    data = {"name": "synthetic", "config": {"kind": "Tokens", "vocabularySize": 16}}
    path = folder / "job.yaml"
    path.write_text(json.dumps(a_manifest(training={"model": model, "data": data})))
    return str(path)


class TestHostileIndex:
    @pytest.mark.parametrize(
        ("content", "part"),
        [
            (b"{", "no index"),
            (b"[]", "no index"),
            (b'{"weight_map": []}', "no index"),
            (b'{"weight_map": {"a": 1}}', "no index"),
            (b'{"weight_map": {"a": "../a.safetensors"}}', "beside the index"),
            (b'{"weight_map": {"a": "/etc/passwd"}}', "beside the index"),
            (b'{"weight_map": {"a": "a.bin"}}', "beside the index"),
            (b'{"weight_map": {"a": "no.safetensors"}}', "cannot be read"),
            (b'{"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}', "`b` is not in a.safetensors"),
            (b'{"weight_map": {"b": "a.safetensors"}}', "`a` is in a.safetensors, where the index does not"),
            (b" " * 26_000_000, "more than 25000000 bytes"),
        ],
    )
    def test_it_ends_with_a_sentence(self, tmp_path, content, part):
        save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
        (tmp_path / INDEX_FILE).write_bytes(content)
        with pytest.raises(CheckpointBroken, match=part):
            read_files(tmp_path / INDEX_FILE)


def test_an_export_in_another_number_format_is_rounded(seeds, exported, tmp_path):
    arguments = ["export", str(seeds["whole"][1]), str(tmp_path / "rounded"), "--model", str(exported)]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    tensors = {name: tensor for file in exported.glob("*.safetensors") for name, tensor in load_file(file).items()}
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert rounded.keys() == tensors.keys()
    assert all(torch.equal(rounded[name], tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main([*arguments, "--dtype", "int8"]) == 2


def test_numbers_that_a_format_has_not_are_refused():
    value = torch.tensor([1.0, 7e4, float("inf")])
    assert _in_format(value, Described("a", torch.bfloat16, (3,))).dtype == torch.bfloat16
    with pytest.raises(InvalidConfiguration, match=r"`a` has numbers of up to .*, but float16 ends at 6.55e"):
        _in_format(value, Described("a", torch.float16, (3,)))
