"""The built-in data sets and models."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from disttrain_api.builtin import DATA_CONFIGS, DigitsConfig, data_config, model_config, samples_of
from disttrain_api.training import Training
from disttrain_trainer.data import digits, synthetic, text
from disttrain_trainer.runtime.errors import DataNotFound
from disttrain_trainer.tasks.supervised import build_model, load_data


def training(model, data, **changes):
    return Training.model_validate({"model": model, "data": data, "steps": 1, "microBatchSize": 2, **changes})


class TestDigits:
    def test_the_split_is_stratified_whole_and_repeatable(self):
        first, again = (digits.load(DigitsConfig()) for _ in range(2))
        assert len(first.training) + len(first.held_out) == 1797
        assert len(first.held_out) == 360
        assert torch.equal(first.held_out.tensors[0], again.held_out.tensors[0])
        shares = torch.bincount(first.held_out.tensors[1]) / torch.bincount(
            torch.cat([first.training.tensors[1], first.held_out.tensors[1]])
        )
        assert shares.min() > 0.19
        assert shares.max() < 0.21

    def test_images_are_scaled(self):
        images = digits.load(DigitsConfig()).training.tensors[0]
        assert images.shape[1:] == (1, 8, 8)
        assert (images.min(), images.max()) == (0.0, 1.0)


class TestText:
    def config(self, **fields):
        return DATA_CONFIGS["text"].model_validate(fields)

    def test_the_standard_library_is_the_default(self):
        loaded = text.load(self.config())
        size = (len(loaded.training) + len(loaded.held_out)) * 128
        assert size > 3_000_000
        assert 0.08 < len(loaded.held_out) * 128 / size < 0.15

    def test_targets_are_the_next_bytes(self, tmp_path):
        (tmp_path / "one.txt").write_bytes(bytes(range(100)))
        loaded = text.load(self.config(paths=[str(tmp_path)], sequenceLength=8, heldOutFraction=0.25))
        inputs, targets = default_collate([loaded.training[index] for index in range(len(loaded.training))])
        assert inputs.flatten().tolist() == list(range(72))
        assert targets.flatten().tolist() == list(range(1, 73))
        assert loaded.held_out[0][0].tolist() == list(range(75, 83))

    def test_whole_files_are_held_out(self, tmp_path):
        for value in range(10):
            (tmp_path / f"{value}.bin").write_bytes(bytes([value]) * 100)
        loaded = text.load(self.config(paths=[str(tmp_path)], sequenceLength=4, heldOutFraction=0.3))
        training, held_out = (set(np.unique(part.text)) for part in (loaded.training, loaded.held_out))
        assert len(held_out) == 3
        assert training | held_out == set(range(10))
        assert not training & held_out

    def test_only_files_that_match_the_pattern_are_read(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"a" * 100)
        (tmp_path / "b.bin").write_bytes(b"b" * 100)
        loaded = text.load(self.config(paths=[str(tmp_path)], pattern="*.txt", sequenceLength=4))
        assert set(loaded.training.text) == {ord("a")}

    @pytest.mark.parametrize(
        ("files", "fields", "part"),
        [
            ({}, {"paths": ["missing"]}, "missing does not exist"),
            ({}, {"paths": ["."]}, "holds no file"),
            ({"a.txt": b"abc"}, {"paths": ["."]}, "3 bytes of training text"),
        ],
    )
    def test_what_is_not_there_is_named(self, tmp_path, monkeypatch, files, fields, part):
        monkeypatch.chdir(tmp_path)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataNotFound, match=part):
            text.load(self.config(**fields))


class TestSynthetic:
    @pytest.mark.parametrize("kind", ["Images", "Tokens"])
    def test_samples_depend_on_seed_and_index_alone(self, kind):
        data = training({"name": "mlp"}, {"name": "synthetic", "config": {"kind": kind, "size": 40}}).data
        first, again = (synthetic.load(data_config(data)) for _ in range(2))
        assert len(first.training) == 36
        assert len(first.held_out) == 4
        for index in (3, 0, 3):
            for own, theirs in zip(first.training[index], again.training[index], strict=True):
                assert torch.equal(torch.as_tensor(own), torch.as_tensor(theirs))
        assert not torch.equal(first.training[0][0], first.held_out[0][0])


PAIRS = [
    ("mlp", {}, "digits", {}),
    ("mlp", {"hiddenSizes": [], "dropout": 0.5}, "synthetic", {"kind": "Images", "channels": 3, "classes": 4}),
    ("resnet", {"blocks": [2, 1, 1], "width": 16}, "digits", {}),
    ("resnet", {"width": 8}, "synthetic", {"kind": "Images", "channels": 3, "height": 12, "width": 9}),
    ("gpt", {"layers": 1}, "text", {"sequenceLength": 16}),
    ("gpt", {"layers": 1, "sequenceLength": 20, "tieWeights": False}, "text", {"sequenceLength": 16}),
    ("gpt", {"layers": 1, "vocabularySize": 50}, "synthetic", {"kind": "Tokens", "vocabularySize": 50}),
]


@pytest.mark.parametrize(("model", "fields", "data", "options"), PAIRS)
def test_each_model_takes_the_data_it_goes_with(model, fields, data, options):
    chosen = training({"name": model, "config": fields}, {"name": data, "config": options})
    loaded = load_data(chosen)
    inputs, _ = default_collate([loaded.training[0], loaded.training[1]])
    outputs = build_model(chosen)(inputs)
    samples = samples_of(data_config(chosen.data))
    expected = (2, samples.classes) if model != "gpt" else (2, samples.length, model_config(chosen).vocabulary_size)
    assert outputs.shape == expected


def test_gpt_2_has_its_124_million_parameters():
    shape = {"layers": 12, "heads": 12, "width": 768, "vocabularySize": 50257, "sequenceLength": 1024}
    chosen = training({"name": "gpt", "config": shape}, {"entrypoint": "a:b"})
    with torch.device("meta"):
        model = build_model(chosen)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_a_token_sees_no_later_one():
    chosen = training({"name": "gpt", "config": {"layers": 2}}, {"name": "text", "config": {"sequenceLength": 8}})
    model = build_model(chosen).eval()
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])
