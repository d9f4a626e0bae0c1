"""Settings of data that a checkpoint is gone on from with as they were: else held-out samples would be trained on."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from disttrain_trainer.checkpoint import kept_samples
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.runtime.errors import CheckpointBroken
from tests.corpora import prepared, sentences
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

GPT = user("double_gpt", vocabularySize=256, sequenceLength=32)
MLP = {"name": "mlp", "config": {"hiddenSizes": [8]}}
TOKENS = {"kind": "Tokens", "size": 100, "sequenceLength": 16}
BEGIN_ANEW = "or begin anew with the checkpoint's weights: `training.checkpoint.initialFrom` and another"
LEAK = "samples that were trained on would be held out, or held-out ones trained on; set it to"
LENGTH = (
    "the position in the data counts samples of the former length, so another one, as for longer contexts late in "
    "training, is for a new job; set it to"
)
REFUSED = {
    "corpus": ("heldOutFraction", 0.1, 0.2, LEAK),
    "mixture": ("heldOutFraction", 0.1, 0.0, LEAK),
    "corpus, longer": ("sequenceLength", 16, 32, LENGTH),
    "text": ("heldOutFraction", 0.1, 0.3, LEAK),
    "text, another split": ("splitSeed", 0, 1, LEAK),
    "text, shorter": ("sequenceLength", 16, 8, LENGTH),
    "digits": ("heldOutFraction", 0.2, 0.25, LEAK),
    "digits, another split": ("splitSeed", 0, 3, LEAK),
    "synthetic": ("heldOutFraction", 0.1, 0.5, LEAK),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    corpus = str(prepared(path, part_bytes=10_000, end_of_document="0"))
    (path / "text").mkdir()
    for number in range(4):
        (path / "text" / f"{number}.txt").write_text("".join(map(sentences, range(number, 40))))
    configs = {
        "corpus": {"path": corpus, "sequenceLength": 16},
        "mixture": {"mixture": [{"path": corpus, "weight": 1}, {"path": corpus, "weight": 2}], "sequenceLength": 16},
        "text": {"paths": [str(path / "text")], "sequenceLength": 16},
        "digits": {},
        "synthetic": TOKENS,
    }

    def run(kind, steps, **changes):
        data = {"name": "corpus" if kind == "mixture" else kind, "config": configs[kind] | changes}
        model = MLP if kind == "digits" else GPT
        return {"training": small(model=model, data=data, steps=steps)}

    cases = {}
    for case, (field, before, now, _) in REFUSED.items():
        kind = case.partition(",")[0]
        first, other = {field: before}, {field: now}
        cases[case] = [run(kind, 2, **first), run(kind, 4, **other), run(kind, 4, **first)]
    cases["documents apart"] = [run("corpus", 2), run("corpus", 4, documentMask=True)]
    cases["data of another kind"] = [run("text", 2, heldOutFraction=0.3), run("synthetic", 4)]
    earlier = small(model=GPT, data=user("double_tokens"), steps=2)
    cases["an earlier version's"] = [{"training": earlier}, run("synthetic", 4)]
    folder = tmp_path_factory.mktemp("world")
    return run_cases(folder, 1, cases) | {"log": (folder / "rank-0.out").read_text()}


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
@pytest.mark.parametrize("case", REFUSED)
def test_another_setting_is_refused_by_name_and_the_former_one_goes_on(results, case):
    field, before, now, why = REFUSED[case]
    first, refused, again = results[case]["errors"]
    assert (first, again) == (None, None)
    assert refused.startswith("CheckpointMismatch: ")
    assert f"step-2 was written with `training.data.config.{field}` {before}, and it is {now} now: {why}" in refused
    assert f"{why} {before} again, {BEGIN_ANEW}" in refused


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
@pytest.mark.parametrize("case", ["documents apart", "data of another kind", "an earlier version's"])
def test_what_does_not_change_the_split_goes_on(results, case):
    assert results[case]["errors"] == [None, None]


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
def test_documents_that_are_kept_apart_are_other_samples_at_the_same_positions(results):
    assert results["log"].count("is another one now; their order goes on where it stood") == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 10**5, json.dumps({"heldOutFraction": [0.1]}).encode()])
def test_what_is_no_settings_is_reported(monkeypatch, content):
    stored = torch.frombuffer(bytearray(content or b"\xff"), dtype=torch.uint8)
    form = TensorStorageMetadata(TensorProperties(dtype=torch.uint8), stored.size(), [])
    reader = SimpleNamespace(read_metadata=lambda: Metadata({"samples.settings": form}), place="step-2")
    monkeypatch.setattr(kept_samples, "load", lambda parts, *_: parts["samples"]["settings"].copy_(stored))
    state = SimpleNamespace(data=Datasets([], None, settings={"heldOutFraction": 0.1}))
    world = SimpleNamespace(from_first=lambda work: work())
    with pytest.raises(CheckpointBroken, match="step-2: what the settings of the data were cannot be read"):
        kept_samples.require_same_settings(state, reader, world)
