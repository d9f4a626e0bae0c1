"""Texts that are tokenised while they are read: every text once in a pass, the same samples in any number of ranks."""

import json
import random
import re
from itertools import islice
from typing import Any

import fsspec
import numpy as np
import pytest

from disttrain_api.batch import Batch
from disttrain_api.lines import LinesConfig
from disttrain_trainer.data import lines
from disttrain_trainer.data.sampler import Cursor, permute
from disttrain_trainer.data.stream import Stream, StreamSampler
from disttrain_trainer.data.texts import blocks, lanes
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration
from tests.corpora import sentences, trained_tokenizer
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, require_same, require_same_bits, require_same_figures, series
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

LENGTH, STEPS = 16, 30


def written(path, texts, **other):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text} | other) + "\n" for text in texts))
    return path


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 100)
    monkeypatch.setattr(lanes, "LANES", 12)


@pytest.fixture(params=["blocks are dealt out", "texts are held whole"])
def either(request, monkeypatch):
    """As many blocks as lanes at least, and fewer."""
    if request.param == "blocks are dealt out":
        request.getfixturevalue("small_blocks")


@pytest.fixture
def folder(tmp_path):
    """Texts shorter and longer than a block, in two files and a folder below; the last line has no end."""
    written(tmp_path / "texts" / "a.jsonl", [sentences(number) for number in range(40)])
    written(tmp_path / "texts" / "b" / "c.ndjson", [sentences(39) * 9, "", sentences(1), "犬" * 50], id=3)
    last = tmp_path / "texts" / "d.jsonl"
    last.write_text("\n\n" + json.dumps({"text": "the end"}))
    (tmp_path / "texts" / "notes.txt").write_text("no JSON")
    return tmp_path / "texts"


TEXTS = [*[sentences(number) for number in range(40)], sentences(39) * 9, "", sentences(1), "犬" * 50, "the end"]


def loaded(path, **fields: Any):
    return lines.load(LinesConfig.model_validate({"path": str(path), "sequenceLength": LENGTH} | fields))


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_each_line_is_of_one_block(folder, monkeypatch, size):
    monkeypatch.setattr(blocks, "BLOCK", size)
    found = blocks.open_blocks(str(folder), "text")
    assert [text for number in range(len(found)) for text in found.texts(number)] == TEXTS


def test_objects_of_a_store_are_read_as_files(folder, small_blocks):
    store = "memory://lines-of-a-test"
    for name in ("a.jsonl", "d.jsonl", "notes.txt"):
        fsspec.filesystem("memory").put_file(str(folder / name), f"{store}/{name}")
    found = blocks.open_blocks(store, "text")
    assert [text for number in range(len(found)) for text in found.texts(number)] == [*TEXTS[:40], "the end"]
    alone = blocks.open_blocks(f"{store}/d.jsonl", "text")
    assert alone.texts(0) == ["the end"]


def test_a_pass_has_every_token_once(folder, small_blocks):
    """Behind the first token of each lane."""
    data = loaded(folder / "a.jsonl")
    found = blocks.open_blocks(str(folder / "a.jsonl"), "text")
    texts = [found.texts(number) for number in range(len(found))]
    whole = b"".join(text.encode() for block in texts for text in block)
    reader = lanes.Lanes(lambda number: lines._bytes(LinesConfig(path="a"))[0](texts[number]), len(texts), 1, 0)
    # One token of each lane after the other, until each has read its blocks of two passes.
    rows: list[list[int]] = [[] for _ in range(12)]
    for number, (_, target) in enumerate(islice(reader, 12 * 2 * len(whole))):
        rows[number % 12].append(int(target))
    order = [
        int(permute(np.array([number % len(texts)]), len(texts), 0, number // len(texts))[0])
        for number in range(12 * len(texts))
    ]
    assert sorted(order[: len(texts)]) == sorted(order[len(texts) : 2 * len(texts)]) == list(range(len(texts)))
    assert order[: len(texts)] != order[len(texts) : 2 * len(texts)]
    for lane, row in enumerate(rows):
        expected = b"".join(text.encode() for number in order[lane::12] for text in texts[number])
        assert bytes(row)[: len(expected) - 1] == expected[1 : 1 + len(row)]
    assert data.vocabulary == 256


def opened(folder, replicas, size):
    """The streams of so many replicas, and their sampler."""
    sampler = StreamSampler.of(Batch(micro=1, accumulation=size // replicas, world=size), replicas)
    streams = [loaded(folder).training for _ in range(replicas)]
    for part, stream in enumerate(streams):
        stream.open(part, replicas, sampler.per_step)
    return streams, sampler


def batches(folder, replicas, size, stop=None, then=None):
    """The samples of each global batch; `stop`: the replicas are made anew before that step, from their positions, and
    are `then` as many."""
    (streams, sampler), cursor, found = opened(folder, replicas, size), Cursor(), []
    for step in range(STEPS):
        if step == stop:
            positions = [stream.position_before(sampler.number(cursor)) for stream in streams]
            streams, sampler = opened(folder, then or replicas, size)
            for part, stream in enumerate(streams):
                if then is None:
                    stream.resume(sampler.number(cursor), positions[part])
                else:
                    stream.resume_from_parts(sampler.number(cursor), positions)
        rows = [
            [bytes(stream[index][0].tolist()) for index in slots.indices.tolist()]
            for replica, stream in enumerate(streams)
            for slots in sampler.microbatches(cursor, replica)
        ]
        found.append(sorted(row for part in rows for row in part))
        cursor = sampler.advance(cursor)
    return found


# A batch has fewer samples than there are lanes, and more.
@pytest.mark.parametrize(("replicas", "size"), [(2, 6), (2, 20), (3, 6), (4, 4), (4, 20)])
def test_any_number_of_replicas_has_the_same_batches(folder, either, replicas, size):
    expected = batches(folder, 1, size)
    assert batches(folder, replicas, size) == expected
    assert len({row for step in expected for row in step}) > 40


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stop", [1, 7, 20])
def test_replicas_go_on_at_their_position(folder, either, replicas, stop):
    assert batches(folder, replicas, 6, stop) == batches(folder, replicas, 6)


@pytest.mark.parametrize(("replicas", "then"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("stop", [1, 7])
def test_another_number_of_replicas_goes_on_with_the_same_batches(folder, either, replicas, then, stop):
    assert batches(folder, replicas, 12, stop, then) == batches(folder, 1, 12)


def test_a_pass_of_few_blocks_has_every_sample_once(tmp_path):
    """Red where lanes without a block of their own begin with one that others have begun with."""
    texts = [random.Random(number).randbytes(400).hex() for number in range(1300)]
    whole = "".join(texts).encode()
    data = loaded(written(tmp_path / "a.jsonl", texts), sequenceLength=1024).training
    size = -(-len(whole) // 1024)
    assert 960 < size < 1100
    passes = [[bytes(data[number][0].tolist()) for number in range(at, at + size)] for at in (0, size)]
    around = whole + whole[:1024]
    expected = [around[at : at + 1024] for at in range(0, len(whole), 1024)]
    assert len(set(passes[0])) == size
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(expected)
    assert passes[0] != passes[1] != expected
    assert bytes(data[2 * size][1].tolist()) in around + around


def test_there_may_be_more_replicas_than_blocks_and_samples(tmp_path):
    path = written(tmp_path / "a.jsonl", ["abcdefghij" * 3])
    expected = batches(path, 1, 6)
    assert batches(path, 6, 6) == batches(path, 3, 6, 7, 6) == expected
    assert len(set(expected[0])) == 2


def test_a_position_of_lanes_is_refused_where_texts_are_held_whole(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(lanes, "LANES", 1)
        position = loaded(folder).training.position_before(0)
    with pytest.raises(ValueError, match=r"in the order of an earlier version, .*: `training.checkpoint.initialFrom`"):
        loaded(folder).training.resume(0, position)
    with pytest.raises(ValueError, match="in the order of an earlier version"):
        loaded(folder).training.resume_from_parts(0, [position, position])


def test_a_number_of_replicas_that_cannot_share_is_named(folder, small_blocks):
    stream = loaded(folder).training
    assert isinstance(stream, Stream)
    with pytest.raises(InvalidConfiguration, match="a number of replicas that divides 12, found 5: change"):
        stream.open(0, 5, 4)


def test_the_end_is_held_out(folder, small_blocks):
    data = loaded(folder, heldOutSamples=5)
    whole = blocks.open_blocks(str(folder), "text")
    kept = len(whole) - data.training._dataset._blocks
    text = "".join(text for number in range(len(whole) - kept, len(whole)) for text in whole.texts(number)).encode()
    assert [(bytes(a.tolist()), bytes(b.tolist())) for a, b in data.held_out] == [
        (text[at : at + LENGTH], text[at + 1 : at + LENGTH + 1]) for at in range(0, 5 * LENGTH, LENGTH)
    ]
    assert loaded(folder).held_out is None
    with pytest.raises(DataNotFound, match=r"heldOutSamples`: .* samples beside the first 64 KiB"):
        loaded(folder, heldOutSamples=10_000)


class TestTokenizers:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        pytest.importorskip("transformers")
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(trained_tokenizer())
        (folder / "tokenizer_config.json").write_text("{}")
        return folder

    def test_texts_are_tokens_and_special_ones_within_are_text(self, tokenizer, tmp_path):
        path = written(tmp_path / "a.jsonl", ["the fox <end> runs"])
        around = {"beginOfDocument": "f", "endOfDocument": "<end>"}
        data = loaded(path, tokenizer=str(tokenizer), sequenceLength=60, **around)
        from tokenizers import Tokenizer

        library = Tokenizer.from_str(trained_tokenizer())
        library.no_truncation()
        library.encode_special_tokens = True
        begin, end = map(library.token_to_id, around.values())
        expected = [begin, *library.encode("the fox <end> runs").ids, end]
        assert expected.count(end) == 1
        tokens, following = data.training[0]
        assert tokens.tolist() == (expected * 60)[:60]
        assert following.tolist() == (expected * 60)[1:61]
        assert data.vocabulary == library.get_vocab_size()

    def test_a_token_that_there_is_not_is_named(self, tokenizer, tmp_path):
        path = written(tmp_path / "a.jsonl", ["the fox"])
        for field in ("beginOfDocument", "endOfDocument"):
            with pytest.raises(InvalidConfiguration, match=f"{field}`: '</s>' is no token of "):
                loaded(path, tokenizer=str(tokenizer), **{field: "</s>"})
            with pytest.raises(InvalidConfiguration, match=f"{field}` needs `tokenizer`"):
                loaded(path, **{field: "</s>"})


def test_other_data_have_another_fingerprint(folder, tmp_path):
    first = loaded(folder).fingerprint
    assert loaded(folder).fingerprint == first
    found = {loaded(folder, **{name: value}).fingerprint for name, value in (("orderSeed", 1), ("heldOutSamples", 1))}
    written(folder / "e.jsonl", ["more"])
    assert len({first, loaded(folder).fingerprint, *found}) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{', "a.jsonl: the line at byte 14: it is no JSON: "),
        ('{"body": "a", "id": 3}', "the line at byte 0: it has no text in `text`; it has body, id: name the field in"),
        ('{"text": 3}', "it has no text in `text`"),
        ("[1]", "it has no text in `text`; it has no fields"),
        ('{"text": "\\ud800"}', "it is no JSON: "),
        ("\n\n", "has no text to train on"),
        ("", "has no text to train on"),
        ('{"text": "' + "a" * 5000, "the line at byte 0: it has more than 1000 bytes; split the text"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(blocks, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(blocks, "BLOCK", 500 if len(content) > 1000 else 2**16)
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataNotFound, match=re.escape(message)):
        loaded(tmp_path)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(DataNotFound, match=r"does not exist \(from "):
        loaded(tmp_path / "none")
    with pytest.raises(DataNotFound, match=r"has 0 files that end with \.jsonl or \.ndjson.*`disttrain data prepare`"):
        loaded(tmp_path)


def test_a_file_that_has_become_shorter_is_named(folder, small_blocks):
    found = blocks.open_blocks(str(folder), "text")
    (folder / "a.jsonl").write_text("")
    with pytest.raises(DataNotFound, match="the file has become shorter than"):
        found.texts(3)


LIKE_ONE: dict[str, dict[str, Any]] = {"dp2": {}, "fsdp2": {SHARD: 2}, "tp2": {TENSOR: 2}}
SIZES = {"many": "one", "few": "few, one"}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """Runs of the real sizes: 970 blocks, each a file, that are dealt out, and some 12, whose texts are held whole."""
    path = tmp_path_factory.mktemp("texts")
    for number in range(970):
        written(path / "many" / f"{number:03}.jsonl", [sentences(number)])
    written(path / "few" / "a.jsonl", [sentences(number) * 50 for number in range(130)])

    def training(name="many", **changes):
        config = {"path": str(path / name), "sequenceLength": 8, "heldOutSamples": 20, **changes}
        model = user("double_gpt", vocabularySize=256)
        common = {"steps": 6, "globalBatchSize": 24, "logging": {"interval": 1}, "checkpoint": {"interval": 2}}
        return small(model=model, data={"name": "lines", "config": config}, **common)

    def stopped(name):
        return [{"training": training(name), "stop_after": 3}]

    # Others are compared with dp2.
    layouts, sizes = asked_for("test_lines", "layout") | {"dp2"}, [*SIZES.keys() & asked_for("test_lines", "size")]
    all_layouts = {name: {"training": training(), "parallelism": layout} for name, layout in LIKE_ONE.items()}
    all_layouts["few, dp2"] = {"training": training("few")}
    cases = {name: [layout] for name, layout in all_layouts.items() if name in layouts}
    cases["resumed"] = [*stopped("many"), {"training": training()}]
    cases["another order"] = [*stopped("many"), {"training": training(orderSeed=4)}]
    cases["pipeline"] = [{"training": training(), "parallelism": {PIPELINE: 2}}]
    # One folder: a case of the second world finds the checkpoint of the first one.
    folder = tmp_path_factory.mktemp("worlds")
    alone = {"one": [{"training": training()}]}
    if "few" in sizes or "few, dp2" in layouts:
        alone["few, one"] = [{"training": training("few")}]
    alone |= {f"{name}, one, then two": stopped(name) for name in sizes}
    cases |= {f"{name}, one, then two": [{"training": training(name)}] for name in sizes}
    return run_cases(folder, 1, alone) | run_cases(folder, 2, cases)


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
@pytest.mark.parametrize(("layout", "alone"), [*((layout, "one") for layout in LIKE_ONE), ("few, dp2", "few, one")])
def test_a_layout_trains_as_one_process(results, layout, alone):
    found, expected = results[layout], results[alone]
    assert found["errors"] == expected["errors"] == [None]
    require_same(found["parameters"], expected["parameters"])
    require_same_figures(found, expected, (HELD_OUT_LOSS,))
    assert len(set(series(found))) == 6


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
def test_a_job_goes_on_to_the_same_bits(results):
    found = results["resumed"]
    assert [error is None for error in found["errors"]] == [False, True]
    require_same_bits(found["parameters"], results["dp2"]["parameters"])


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
@pytest.mark.parametrize(("size", "alone"), SIZES.items())
def test_a_job_goes_on_with_another_number_of_replicas(results, size, alone):
    found = results[f"{size}, one, then two"]
    assert found["errors"] == [None]
    require_same(found["parameters"], results[alone]["parameters"])
    require_same_figures(found, results[alone], (HELD_OUT_LOSS,))


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
def test_a_job_does_not_go_on_with_other_data(results):
    assert results["another order"]["errors"][1].startswith("CheckpointMismatch: ")


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
def test_a_pipeline_is_refused(results):
    assert "stages of a pipeline read samples by their numbers" in results["pipeline"]["errors"][0]
