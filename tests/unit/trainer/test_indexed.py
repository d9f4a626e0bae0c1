"""Indexed data sets of Megatron-LM, in both of their forms."""

import os
from pathlib import Path

import numpy as np
import pytest

from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import CorpusError
from disttrain_trainer.data.corpora.megatron import open_indexed
from disttrain_trainer.data.corpora.spans import split
from disttrain_trainer.data.corpora.stream import TokenStream

TOKENS = [list(range(1, 40)), [200, 3], list(range(50)), [7] * 30]


def write_indexed(folder: Path, older: bool, dtype: str = "<u2", code: int = 8, tokens=TOKENS, ends=(1, 3, 4)) -> Path:
    """What Megatron-LM writes: sequences, and how many of them there are up to the end of each document. Of those that
    are here by default, the middle two are one document."""
    folder.mkdir(exist_ok=True)
    arrays = [np.array(sequence, dtype) for sequence in tokens]
    (folder / "set.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = np.array([len(array) for array in arrays])
    places, documents = np.concatenate([[0], np.cumsum(lengths)]), np.array([0, *ends])
    size, count = np.dtype(dtype).itemsize, len(arrays)
    if older:
        head = b"TNTIDX\0\0" + np.array([1, code, size, count, count, len(documents)], "<u8").tobytes()
        tables = [np.arange(count + 1), places, lengths, documents]
    else:
        counts = np.array([count, len(documents)], "<u8").tobytes()
        head = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([code]) + counts
        tables = [lengths.astype("<i4"), places[:-1] * size, documents]
    rest = b"".join(table.astype(table.dtype if table.dtype == np.int32 else "<i8").tobytes() for table in tables)
    (folder / "set.idx").write_bytes(head + rest)
    return folder / "set.idx"


@pytest.mark.parametrize("length", [10, 5_000, 1_000_000])
def test_other_tokens_below_the_same_index_are_another_data_set(length, tmp_path):
    """As another tokenizer of equally many tokens writes them. Red where the index alone tells data sets apart."""
    written = np.random.default_rng(3).integers(0, 200, (2, length)).tolist()
    one, other, same = (
        open_indexed(write_indexed(tmp_path / name, False, tokens=[tokens], ends=[1]), 256).fingerprint
        for name, tokens in (("one", written[0]), ("other", written[1]), ("same", written[0]))
    )
    assert one == same != other


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_an_indexed_data_set_is_read_as_it_is(older, dtype, code, tmp_path):
    index = write_indexed(tmp_path, older, dtype, code)
    files, corpus = NumberFiles(), open_indexed(index, 256)
    training, held_out = (TokenStream(spans, 256, files) for spans in split(corpus.shards, 0.25, files))
    whole = [token for tokens in TOKENS for token in tokens]
    # Cut at the beginning of the last document.
    assert training.read(0, len(training)).tolist() == whole[:-30]
    assert held_out.read(0, len(held_out)).tolist() == [7] * 30
    assert [corpus.shards[0].documents.start(document, files) for document in range(4)] == [0, 39, 91, 121]
    with pytest.raises(CorpusError, match=r"set\.bin holds token 200, expected tokens below 100"):
        TokenStream(split(corpus.shards, 0.0, files)[0], 100, files).read(0, 50)
    content = index.read_bytes()
    counts = slice(32, 40) if older else slice(18, 26)
    huge = content[: counts.start] + (2**60).to_bytes(8, "little") + content[counts.stop :]
    for spoiled in (content[:-8], content + b"\0" * 8, content[:20], b"", b"plain" * 20, huge):
        index.write_bytes(spoiled)
        with pytest.raises(CorpusError, match=r"set\.idx"):
            open_indexed(index, 256)
    index.write_bytes(content)
    os.truncate(index.with_suffix(".bin"), 80)
    with pytest.raises(CorpusError, match=r"set\.idx is not the index of .*set\.bin"):
        open_indexed(index, 256)
