"""`documentMask`: what is packed into a sample is trained as if each document were a sample of its own."""

import json
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings
from disttrain_api.compute import ActivationCheckpointing
from disttrain_api.corpus import CorpusConfig
from disttrain_trainer.data import corpus as corpus_data
from disttrain_trainer.data.corpora.corpus import open_corpus
from disttrain_trainer.data.packed import pack
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.parallel.activations import recompute
from disttrain_trainer.parallel.context import documents as documents_module
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.runtime.errors import DataNotFound
from tests.unit.trainer.comparisons import (
    HELD_OUT_LOSS,
    LOSS,
    require_same,
    require_same_bits,
    require_same_training,
    series,
)
from tests.unit.trainer.context_code import of_parts
from tests.unit.trainer.layouts import ACCUMULATE, CONTEXT, FULL, PIPELINE, RING, SELECTIVE, SHARD, TENSOR
from tests.unit.trainer.test_estimate import estimated
from tests.unit.trainer.test_indexed import TOKENS as INDEXED
from tests.unit.trainer.test_indexed import write_indexed
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.user_code import double_gpt
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, run_layouts, small, user

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
LENGTH = 8
# Lengths of the documents of each sample; the last one goes on behind its sample.
BATCH = [[3, 1, 4], [8], [2, 6], [7, 2]]


def packed_batch():
    generator = torch.Generator().manual_seed(3)
    windows = torch.randint(0, 16, (len(BATCH), LENGTH + 1), generator=generator)
    firsts = [[0, *(int(at) for at in np.cumsum(lengths) if at <= LENGTH)] for lengths in BATCH]
    samples = [pack(window, first) for window, first in zip(windows, firsts, strict=True)]
    documents = [
        window[begin:end]
        for window, first in zip(windows, firsts, strict=True)
        for begin, end in pairwise([*first, LENGTH + 1])
    ]
    return [torch.stack(parts) for parts in zip(*samples, strict=True)], documents


def total(model, inputs, targets):
    """The sum of the losses of all targets."""
    return functional.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


MODELS = {
    "gpt": lambda: double_gpt(bias=False, tieWeights=False),
    "llama": lambda: double_transformers("llama"),
    "qwen3": lambda: double_transformers("qwen3"),
    "qwen2, windows": lambda: double_transformers("qwen2, windows"),
}


def made(name):
    pytest.importorskip("transformers")
    torch.manual_seed(2)
    return MODELS[name]()


@pytest.mark.parametrize("way", ["as it is", "recomputed", "compiled", "as on a GPU", "compiled as for a GPU"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_unpacked(name, way, monkeypatch):
    (inputs, targets, starts), documents = packed_batch()
    alone = made(name)
    # A document of one token predicts nothing.
    losses = [total(alone, one[None, :-1], one[None, 1:]) for one in documents if len(one) > 1]
    expected = sum(losses)
    of_documents = gradients(alone, expected)
    model, apart = made(name), Documents(None)
    model.use_context(apart)
    apart.use(starts)
    if way == "recomputed":
        recompute(model.layers(), ActivationCheckpointing.SELECTIVE)
    if "GPU" in way:
        monkeypatch.setattr(documents_module, "in_host_memory", lambda values: False)
    if "compiled" in way:
        apart.stay_out_of_graphs(torch.device("cpu"))
    found = (torch.compile(total, backend="eager") if "compiled" in way else total)(model, inputs, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    require_same(gradients(model, found), of_documents)


@pytest.mark.parametrize("name", MODELS)
def test_samples_of_one_document_each_are_computed_as_without(name):
    (inputs, targets, starts), _ = packed_batch()
    model = made(name)
    expected = gradients(model, total(model, inputs, targets))
    apart = Documents(None)
    model.use_context(apart)
    apart.use(torch.zeros_like(starts))
    require_same_bits(gradients(model, total(model, inputs, targets)), expected)


def test_a_sample_says_where_its_documents_begin_and_what_they_do_not_predict():
    window = torch.arange(10, 19)
    inputs, targets, starts = pack(window, [3, 4, 8])
    assert inputs.tolist() == list(range(10, 18))
    # Positions of a document that began before the sample begin with the sample.
    assert starts.tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    assert targets.tolist() == [11, 12, IGNORED, IGNORED, 15, 16, 17, IGNORED]
    # One document is longer than the sample.
    inputs, targets, starts = pack(window, [])
    assert targets.tolist() == window[1:].tolist()
    assert not starts.any()
    assert pack(window, [0]).targets.tolist() == window[1:].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of several shards of many short documents each."""
    parent, draw = tmp_path_factory.mktemp("corpus"), random.Random(7)
    sources = parent / "sources.jsonl"
    texts = ("".join(draw.choices("abcdefgh", k=draw.randint(1, 14))) for _ in range(1500))
    sources.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(Settings((sources,), "bytes", parent / "corpus", part_bytes=8_000))
    return parent / "corpus"


def loaded(path, **fields):
    given = {"path": path and str(path), "sequence_length": 64, "document_mask": True}
    return corpus_data.load(CorpusConfig(**given | fields))


def beginnings(samples, length):
    """Where documents begin in the tokens of all samples."""
    found = set()
    for index in range(len(samples)):
        sample = samples[index]
        first = (sample.starts == torch.arange(length)).nonzero().flatten() + index * length
        found |= set(first.tolist())
        unpredicted = ((sample.targets == IGNORED).nonzero().flatten() + index * length + 1).tolist()
        assert set(first[1:].tolist()) <= set(unpredicted)
        found |= set(unpredicted)
    return found


def test_documents_begin_where_the_corpus_says(folder):
    data, plain = loaded(folder, held_out_fraction=0.1), loaded(folder, held_out_fraction=0.1, document_mask=False)
    assert data.packed
    assert not plain.packed
    training, held_out, shards = data.training, data.held_out, open_corpus(folder).shards
    assert len(shards) > 3
    assert torch.equal(training[5].inputs, plain.training[5][0])
    offsets = [np.fromfile(shard.documents.path, "<u8").astype(np.int64) for shard in shards]
    cuts = [span.stop for span in training.tokens._spans]
    expected, kept = set(), set()
    passed = passed_held_out = 0
    for shard, first, cut in zip(shards, offsets, cuts, strict=True):
        expected |= {passed + int(at) for at in first if at < cut}
        kept |= {passed_held_out} | {passed_held_out + int(at) - cut for at in first[:-1] if at > cut}
        passed, passed_held_out = passed + cut, passed_held_out + shard.tokens - cut
    for samples, wanted in ((training, expected), (held_out, kept)):
        # Each sample begins with the first position of some document.
        edges = set(range(0, len(samples) * 64, 64))
        assert beginnings(samples, 64) | edges == {at for at in wanted if at <= len(samples) * 64} | edges


def test_documents_of_indexed_data_sets_and_of_mixtures_are_kept_apart(tmp_path):
    index = write_indexed(tmp_path / "set", older=False)
    fields = {"vocabulary_size": 256, "sequence_length": 20, "held_out_fraction": 0.0}
    found = beginnings(loaded(index, **fields).training, 20)
    first, second, third, _ = map(len, INDEXED)
    # The sequences in the middle are one document, and samples begin every 20 tokens.
    assert found == {0, 20, 40, 60, 80, 100, first, first + second + third}
    mixed = loaded(None, mixture=[{"path": str(index)}], **fields)
    assert mixed.training[1].starts.tolist() == [0] * 19 + [19]


@pytest.mark.parametrize("place", [1, 2])
def test_offsets_that_fall_are_reported(folder, tmp_path, place):
    own = tmp_path / "corpus"
    shutil.copytree(folder, own)
    samples = loaded(own, held_out_fraction=0.0).training
    path = own / "shard-000000.offsets"
    offsets = np.fromfile(path, "<u8")
    offsets[place + 1] = offsets[place] - 1
    path.write_bytes(offsets.tobytes())
    with pytest.raises(DataNotFound, match=r"shard-000000\.tokens: document \d+ begins at token \d+, expected \d+ or"):
        [samples[index] for index in range(len(samples))]


def training(folder, model, **changes):
    config = {"path": str(folder), "sequenceLength": 16, "heldOutFraction": 0.05, "documentMask": True}
    data = {"name": "corpus", "config": config | changes.pop("data", {})}
    optimizer = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
    common = {"steps": 3, "logging": {"interval": 1}, "evaluation": {"batchSize": 32}}
    return small(**common, model=model, data=data, optimizer=optimizer, **changes)


def of_family(name, **config):
    entrypoint = "tests.unit.trainer.transformers_code:double_transformers"
    return {"entrypoint": entrypoint, "config": {"family": name, "vocab_size": 256, **config}}


GPT = user("double_gpt", vocabularySize=256, sequenceLength=16, bias=False)
TRAINED = {
    "gpt": GPT,
    **{name: of_family(name) for name in ("llama", "qwen3", "qwen2, windows")},
    "llama, as many keys": of_family("llama", num_key_value_heads=4),
}
LAYOUTS = {
    "dp2": (2, "gpt", {}, ACCUMULATE | {"dataWorkers": 1}),
    "dp2, compiled": (2, "gpt", {}, {"compile": True}),
    "fsdp2": (2, "gpt", {SHARD: 2}, FULL),
    "tp2": (2, "gpt", {TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True}, SELECTIVE),
    "pp2, GPipe": (2, "gpt", {PIPELINE: 2, "pipeline": {"schedule": "GPipe"}}, FULL),
    "pp2, zero bubble": (
        2,
        "gpt",
        {PIPELINE: 2, "pipeline": {"schedule": "InterleavedZeroBubble"}},
        {"gradientAccumulationSteps": 3} | FULL,
    ),
    # The rank in the middle has neither inputs nor targets.
    "pp3": (3, "gpt", {PIPELINE: 3}, {}),
    "cp2": (2, "gpt", {CONTEXT: 2}, {}),
    "cp2, ring": (2, "gpt", {CONTEXT: 2, **RING}, ACCUMULATE | SELECTIVE),
    "cp2, ring, compiled": (2, "gpt", {CONTEXT: 2, **RING}, {"compile": True}),
    "cp4": (4, "llama, as many keys", {CONTEXT: 4}, {}),
    "cp2 x fsdp2": (4, "llama, as many keys", {CONTEXT: 2, SHARD: 2}, {}),
    "cp2 x tp2": (
        4,
        "llama, as many keys",
        {CONTEXT: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
        {},
    ),
    "pp2 x cp2": (4, "llama, as many keys", {PIPELINE: 2, CONTEXT: 2}, {}),
    "cp4, ring": (4, "gpt", {CONTEXT: 4, **RING}, FULL),
    "cp2 x fsdp2, ring, of a llama": (4, "llama", {CONTEXT: 2, SHARD: 2, **RING}, {}),
    "pp2 x cp2, ring": (
        4,
        "gpt",
        {PIPELINE: 2, CONTEXT: 2, **RING, "pipeline": {"schedule": "InterleavedZeroBubble"}},
        FULL,
    ),
    "cp2 x tp2, ring": (
        4,
        "gpt",
        {CONTEXT: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True, **RING},
        FULL,
    ),
    "tp2 of a llama": (2, "llama", {TENSOR: 2}, {}),
    "pp2 of a qwen3": (2, "qwen3", {PIPELINE: 2}, FULL),
    "fsdp2, windows": (2, "qwen2, windows", {SHARD: 2}, {}),
    "cp2, windows": (2, "qwen2, windows", {CONTEXT: 2}, FULL),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, folder):
    storage = {"checkpoint": {"interval": 100}}
    cases = {name: [{"training": training(folder, model)}] for name, model in TRAINED.items()}
    cases["across"] = [{"training": training(folder, GPT, data={"documentMask": False})}]
    cases["resumed"] = [{"training": training(folder, GPT, **storage), "stop_after": after} for after in (2, 9)]
    cases["unaware"] = [{"training": training(folder, of_parts("partless"))}]
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module")
def together(tmp_path_factory, folder, asked_for):
    trainings = {name: training(folder, model) for name, model in TRAINED.items()}
    asked = asked_for("test_document_mask", "layout")
    return run_layouts(tmp_path_factory, trainings, {name: LAYOUTS[name] for name in LAYOUTS if name in asked})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(alone, together, layout):
    require_same_training(together[layout], alone[LAYOUTS[layout][1]])


def test_it_changes_what_is_trained_and_what_is_evaluated(alone):
    apart, across = alone["gpt"], alone["across"]
    for key in (LOSS, HELD_OUT_LOSS):
        assert all(one != other for one, other in zip(series(apart, key), series(across, key), strict=True))


def test_a_job_that_resumes_goes_on_with_the_same_samples(alone):
    stopped, resumed = alone["resumed"]["errors"]
    assert stopped.startswith("Stopped: ")
    assert resumed is None
    require_same_bits(alone["resumed"]["parameters"], alone["gpt"]["parameters"])


def test_a_model_that_cannot_keep_documents_apart_is_refused(alone):
    (error,) = alone["unaware"]["errors"]
    assert error.startswith("InvalidConfiguration: `training.data.config.documentMask`: the model Sequential has no")


def test_the_memory_of_a_job_with_documents_is_estimated(folder):
    config = {"vocabularySize": 256, "layers": 1, "heads": 2, "width": 16}
    for layout in ({}, {CONTEXT: 2, **RING}):
        found = estimated(training(folder, {"name": "gpt", "config": config}), 2, layout)
        assert found.unknown is None
        assert found.peak > found.held
