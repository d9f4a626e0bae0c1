"""Corpora in training: the same samples in every layout, held-out ends, sentences for folders that are not sound."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings
from disttrain_api.corpus import CorpusConfig, corpus_problems
from disttrain_trainer.checkpoint.checkpoints import restore_values
from disttrain_trainer.data import corpus as corpus_data
from disttrain_trainer.data.corpora.corpus import open_corpus
from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import CorpusManifest
from disttrain_trainer.data.corpora.spans import split
from disttrain_trainer.data.corpora.stream import TokenStream
from disttrain_trainer.data.rows import Rows
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.runtime.errors import CheckpointMismatch, DataNotFound
from tests.corpora import prepared, sentences, trained_tokenizer
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import job, run_ranks


def loaded(folder: Path, **fields: object):
    return corpus_data.load(CorpusConfig(**{"path": str(folder), "sequence_length": 16, **fields}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Several shards of several documents each."""
    return prepared(tmp_path_factory.mktemp("corpus"), part_bytes=10_000, end_of_document="0")


def test_sequences_go_on_across_documents_and_shards(tmp_path):
    text = "".join(sentences(number) for number in range(300)).encode()
    sources = tmp_path / "sources"
    sources.mkdir()
    for number in range(3):
        (sources / f"{number}.txt").write_bytes(text[number * 1000 : (number + 1) * 1000])
    prepare(Settings((sources,), "bytes", folder := tmp_path / "corpus", part_bytes=1000))
    assert len(open_corpus(folder).shards) == 3
    samples = loaded(folder, held_out_fraction=0.0)
    assert samples.held_out is None
    inputs, targets = default_collate([samples.training[index] for index in range(len(samples.training))])
    assert inputs.dtype == torch.int64
    assert bytes(inputs.flatten().tolist()) == text[: inputs.numel()]
    assert bytes(targets.flatten().tolist()) == text[1 : inputs.numel() + 1]
    assert inputs.numel() > 3000 - 17


@pytest.mark.parametrize("document_mask", [False, True])
def test_samples_that_are_read_together_are_those_that_are_read_alone(folder, document_mask):
    """Red where a row that goes across shards, or the order of a mixture's samples, comes out otherwise."""
    entries = [{"path": str(folder), "weight": weight} for weight in (1.0, 2.0)]
    for samples in (loaded(folder, document_mask=document_mask), loaded(folder, path=None, mixture=entries)):
        indices = [5, 0, len(samples.training) - 1, *range(600, 700), 5]
        together = samples.training.__getitems__(indices)
        assert len(together) == len(indices)
        for index, sample in zip(indices, together, strict=True):
            alone = samples.training[index]
            assert type(sample) is type(alone)
            assert all(torch.equal(*pair) for pair in zip(sample, alone, strict=True))
        batch = default_collate(list(together))
        if isinstance(together, Rows):
            assert all(torch.equal(*pair) for pair in zip(together.batch, batch, strict=True))
            assert all(part.is_contiguous() for part in together.batch)


def test_the_end_of_each_shard_is_held_out_from_a_document_on(folder):
    corpus, files = open_corpus(folder), NumberFiles()
    training, held_out = split(corpus.shards, 0.1, files)
    assert len(training) == len(held_out) == len(corpus.shards) > 3
    for before, after in zip(training, held_out, strict=True):
        assert (before.start, before.stop, after.stop) == (0, after.start, before.shard.tokens)
        assert 0.05 <= after.tokens / after.shard.tokens <= 0.2
        starts = np.fromfile(after.shard.documents.path, "<u8")
        near = starts[(starts >= after.shard.tokens * 0.81) & (starts <= after.shard.tokens * 0.94)]
        assert after.start in starts or len(near) == 0
    assert split(corpus.shards, 0.1, files) == (training, held_out)


def test_of_one_document_the_end_is_held_out(tmp_path):
    samples = loaded(prepared(tmp_path, bytes(range(100)) * 10), held_out_fraction=0.1)
    assert (len(samples.training.tokens), len(samples.held_out.tokens)) == (900, 100)


def test_few_files_are_open_at_once(folder):
    files = NumberFiles(most_open=2)
    corpus = open_corpus(folder)
    stream = TokenStream(split(corpus.shards, 0.0, files)[0], corpus.vocabulary, files)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - of this process
    whole = stream.read(0, len(stream))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208
    assert whole[1000:1010].tolist() == stream.read(1000, 10).tolist()


def rewritten(folder: Path, **fields: object) -> None:
    """A manifest that says so of itself, with the fingerprint that belongs to it."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    for name, value in fields.items():
        place = raw
        *steps, last = name.split("__")
        for step in steps:
            place = place[int(step) if step.isdigit() else step]
        place[last] = value
    path.write_text(CorpusManifest.model_construct(**CorpusManifest.model_validate(raw).__dict__).text())


def cut(path: Path, left_out: int) -> None:
    os.truncate(path, path.stat().st_size - left_out)


def replaced(path: Path, make) -> None:
    path.unlink()
    make(path)


HOSTILE = {
    "no folder": (shutil.rmtree, "is no folder"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "no JSON": (lambda folder: (folder / "manifest.json").write_text("{"), "is no manifest of a corpus"),
    "deep JSON": (lambda folder: (folder / "manifest.json").write_text("[" * 10**6), "is no manifest of a corpus"),
    "another fingerprint": (
        lambda folder: (folder / "manifest.json").write_text((folder / "manifest.json").read_text() + " "),
        "is not as it was written",
    ),
    "another type": (lambda folder: rewritten(folder, tokenType="uint32"), "uint32 conflicts with 256"),
    "another format": (lambda folder: rewritten(folder, format="disttrain-corpus/9"), "expected 'disttrain-corpus/1'"),
    "many tokens": (lambda folder: rewritten(folder, shards__0__tokens=2**40), "has .* bytes, expected 2199023255552"),
    "shards twice": (lambda folder: rewritten(folder, shards__1__number=0), "do not rise"),
    "a cut shard": (
        lambda folder: cut(folder / "shard-000001.tokens", 2),
        "shard-000001.tokens has .* bytes, expected",
    ),
    "cut offsets": (lambda folder: cut(folder / "shard-000001.offsets", 8), "shard-000001.offsets has"),
    "no shard": (
        lambda folder: (folder / "shard-000001.tokens").unlink(),
        "shard-000001.tokens cannot be read: No such",
    ),
    "a link": (
        lambda folder: replaced(folder / "shard-000001.tokens", lambda path: path.symlink_to("/etc/passwd")),
        "it is a symbolic link",
    ),
    "a pipe": (lambda folder: replaced(folder / "shard-000001.tokens", os.mkfifo), "it is no regular file"),
    "offsets beyond": (
        lambda folder: (folder / "shard-000000.offsets").write_bytes(
            b"\xff" * (folder / "shard-000000.offsets").stat().st_size
        ),
        "shard-000000.offsets: document .* begins at token",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_folder_that_is_not_sound_is_reported(case, folder, tmp_path):
    own = tmp_path / "corpus"
    shutil.copytree(folder, own)
    spoil, sentence = HOSTILE[case]
    spoil(own)
    with pytest.raises(DataNotFound, match=sentence):
        loaded(own)


def test_a_shard_that_is_spoiled_while_it_is_read_is_reported(folder, tmp_path):
    own = tmp_path / "corpus"
    shutil.copytree(folder, own)
    samples = loaded(own)
    path = own / "shard-000000.tokens"
    with path.open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DataNotFound, match="holds token 65535, expected tokens below 256"):
        samples.training[0]
    os.truncate(path, 10)
    with pytest.raises(DataNotFound, match=r"shard-000000\.tokens is shorter than it was"):
        samples.training[0]


def training(folder: Path, steps: int, **model: object):
    return {
        "model": {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8, **model}},
        "data": {"name": "corpus", "config": {"path": str(folder), "sequenceLength": 16}},
        "steps": steps,
        "globalBatchSize": 4,
    }


def test_a_checkpoint_goes_on_with_its_own_corpus_alone(folder, tmp_path):
    storage = tmp_path / "storage"
    other = prepared(tmp_path / "other", part_bytes=10_000, end_of_document="1")
    assert len(loaded(other).training) == len(loaded(folder).training)
    assert [rank.code for rank in run_ranks(tmp_path / "first", job(training(folder, 2)), storage=storage)] == [0]
    (rank,) = run_ranks(tmp_path / "another", job(training(other, 4)), storage=storage, attempt=2)
    assert rank.report.error.reason == "CheckpointMismatch"
    assert "was written with other data than `training.data` names now" in rank.report.error.message
    (rank,) = run_ranks(tmp_path / "again", job(training(folder, 4)), storage=storage, attempt=3)
    assert (rank.code, rank.report.step) == (0, 4), rank.err


@pytest.mark.parametrize(
    "model",
    [
        {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8, "vocabularySize": 200}},
        {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8, "vocabularySize": 200}, "metaDevice": True},
        {"name": "transformers", "config": {"config": described("llama") | {"vocab_size": 200}}},
    ],
)
def test_a_model_with_fewer_tokens_than_the_corpus_is_refused(folder, tmp_path, model):
    (rank,) = run_ranks(tmp_path / "world", job(training(folder, 2) | {"model": model}))
    assert rank.report.error.reason == "InvalidConfiguration", rank.err
    assert "`training.model`: its vocabulary of 200 must be greater than or equal to that" in rank.report.error.message


def test_a_mixture_draws_from_each_corpus_in_its_share_and_reads_all_of_each(tmp_path):
    for size in (10, 90):
        (tmp_path / str(size)).mkdir()
    small, large = (prepared(tmp_path / str(size), bytes([size]) * size * 160) for size in (10, 90))
    fields = {"path": None, "held_out_fraction": 0.0}
    entries = [{"path": str(small), "weight": 1.0}, {"path": str(large), "weight": 1.0}]
    mixed = loaded(small, mixture=entries, **fields)
    first = np.array([int(mixed.training[index][0][0]) for index in range(len(mixed.training))])
    assert abs((first == 10).mean() - 0.5) < 0.01
    seen = [mixed.training.mixture.locate(index) for index in range(len(mixed.training))]
    assert set(seen) == {(0, at) for at in range(99)} | {(1, at) for at in range(899)}
    # By the number of tokens, and evened out.
    unweighted = [{"path": str(small)}, {"path": str(large)}]
    for temperature, expected in ((None, 0.1), (2.0, 0.25)):
        found = loaded(small, mixture=unweighted, temperature=temperature, **fields)
        counted = [found.training.mixture.locate(index)[0] for index in range(len(found.training))]
        assert abs(counted.count(0) / len(counted) - expected) < 0.01
        assert found.fingerprint != mixed.fingerprint


def test_a_temperature_of_one_is_the_same_data_as_none(folder):
    """Checkpoints of both that earlier releases wrote, where one had 1.0 in place of None, are gone on from."""
    mixture = [{"path": str(folder), "weight": 1.0}, {"path": str(folder), "weight": 2.0}]
    plain, one, two = (loaded(folder, path=None, mixture=mixture, temperature=given) for given in (None, 1.0, 2.0))
    lines = [f"{open_corpus(folder).fingerprint} {entry['weight']}" for entry in mixture]
    without, written = (hashlib.sha256("\n".join([*lines, text]).encode()).hexdigest() for text in ("None", "1.0"))
    assert plain.fingerprint == one.fingerprint == without != two.fingerprint

    def goes_on(data, fingerprint):
        state = SimpleNamespace(
            data=data, precision=SimpleNamespace(scaler=None), guard=None, sampler=SimpleNamespace(size=9)
        )
        train = {"step": 2, "epoch": 0, "position": 4, "samples": 9, "corpus": int(fingerprint[:15], 16)}
        try:
            restore_values(state, {"train": train}, 0, "step-2")
        except CheckpointMismatch:
            return False
        return state.cursor == Cursor(0, 4)

    assert all(goes_on(data, fingerprint) for data in (plain, one) for fingerprint in (without, written))
    assert not goes_on(two, without)
    assert not goes_on(two, written)
    assert not goes_on(loaded(folder), written)


def test_corpora_of_two_tokenizers_do_not_mix(folder, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(trained_tokenizer())
    (tmp_path / "other").mkdir()
    other = prepared(tmp_path / "other", b"the quick brown fox " * 1000, tokenizer=str(tokenizer))
    with pytest.raises(DataNotFound, match="was prepared with another tokenizer than"):
        loaded(folder, path=None, mixture=[{"path": str(folder)}, {"path": str(other)}])


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "exactly one of `path` and `mixture`"),
        ({"path": "a", "mixture": [{"path": "b"}]}, "exactly one of `path` and `mixture`"),
        ({"path": "a", "temperature": 2}, "needs `mixture`"),
        (
            {"mixture": [{"path": "b", "weight": 3}, {"path": "a"}, {"path": "c"}]},
            "in each entry or in none: a has none",
        ),
        ({"path": "a.bin"}, "must be given: a.bin does not record"),
        ({"path": "a", "vocabularySize": 9}, "must be left out"),
        ({"path": "a", "cacheFolder": "/cache"}, "needs a corpus in an object store"),
        ({"path": "https://h/a"}, "must be a folder or s3://bucket/folder, found https://h/a"),
        ({"path": "s3:///x"}, "must be a folder or s3://bucket/folder"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, found):
    (problem,) = corpus_problems(CorpusConfig.model_validate(fields))
    assert found in problem[1]
