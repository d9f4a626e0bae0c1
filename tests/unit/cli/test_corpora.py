"""`disttrain data`: the same corpus by however many processes and after whatever kill, and sentences for bad input."""

import bz2
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from disttrain.corpora.documents import BLOCK_BYTES
from disttrain.corpora.look import inspect, verify
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings, SpecialTokens
from disttrain.main import main
from disttrain.output import Outlet
from disttrain_trainer.data.corpora.manifest import CorpusError
from tests.corpora import (
    content_of,
    prepared,
    sentences,
    session_lives,
    tokens_of,
    trained_tokenizer,
    write_sources,
)
from tests.small_disk import small_disk
from tests.waiting import until


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained_tokenizer())
    return path


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, tokenizer: Path) -> None:
    sources = write_sources(tmp_path / "sources", lines=150)
    found = []
    for workers in (1, 2, 3):
        output = tmp_path / f"by-{workers}"
        progress = []
        settings = Settings(
            (sources,), str(tokenizer), output, end_of_document="<end>", part_bytes=15_000, workers=workers
        )
        manifest = prepare(settings, progress.append)
        assert progress[-1].shards == progress[-1].total_shards == len(manifest.shards) > 3
        assert progress[-1].source_bytes == progress[-1].total_bytes
        assert not settings.partial.exists()
        found.append(content_of(output))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_command_tells_what_it_made_and_shows_where(terminal, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(Outlet, "isatty", lambda self: terminal)
    source, output = tmp_path / "a.txt", tmp_path / "corpus"
    source.write_text("text\n" * 100)
    options = ["--tokenizer", "bytes", "--output", str(output), "--workers", "1"]
    assert main(["data", "prepare", str(source), *options]) == 0
    out, err = capfd.readouterr()
    assert out == f"{output}\n"
    assert f"{inspect(output).tokens} tokens" in err.splitlines()[-1]


def test_tokens_are_those_of_the_tokenizer_and_documents_end_with_theirs(tmp_path: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(trained_tokenizer())
    library.no_truncation()
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.txt").write_text(sentences(3) * 20)
    (sources / "b.jsonl").write_text("".join(json.dumps({"text": sentences(at)}) + "\n" for at in range(300)))
    with gzip.open(sources / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "naïve 犬"}) + "\n\n" + json.dumps({"text": ""}) + "\n")
    (sources / ".hidden.txt").write_text("not read")
    output = tmp_path / "corpus"
    prepare(Settings((sources,), str(tokenizer), output, end_of_document="<end>", part_bytes=5_000))
    texts = [sentences(3) * 20, *(sentences(at) for at in range(300)), "naïve 犬"]
    end = library.token_to_id("<end>")
    expected = [token for text in texts for token in [*library.encode(text).ids, end]]
    assert tokens_of(output) == expected
    figures = inspect(output)
    assert (figures.documents, figures.tokens, figures.end_of_document) == (302, len(expected), end)
    starts = np.fromfile(output / "shard-000000.offsets", "<u8").tolist()
    assert starts[:2] == [0, len(library.encode(texts[0]).ids) + 1]
    verify(output)


def test_a_long_text_of_bytes_is_one_document_and_whole(tmp_path: Path) -> None:
    text = ("x" * 99 + "\n").encode() * (BLOCK_BYTES // 40) + b"\xff end"
    output = prepared(tmp_path, text)
    assert bytes(tokens_of(output)) == text
    assert inspect(output).documents == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_goes_on_and_writes_the_same(tmp_path: Path, workers: int) -> None:
    sources = write_sources(tmp_path / "sources", lines=100)
    whole, output = tmp_path / "whole", tmp_path / "corpus"
    asked = {"sources": (sources,), "tokenizer": "bytes", "part_bytes": 4_000, "workers": workers}
    prepare(Settings(**asked, output=whole))
    script = tmp_path / "program.py"
    script.write_text(KILLED_AFTER_THREE_SHARDS)
    with subprocess.Popen([sys.executable, script, sources, output, str(workers)], start_new_session=True) as process:
        assert process.wait() == -signal.SIGKILL
    # Workers end with their parent.
    until(lambda: not session_lives(process.pid))
    progress = []
    prepare(Settings(**asked, output=output), progress.append)
    assert 3 <= progress[0].shards < progress[0].total_shards
    assert content_of(output) == content_of(whole)


KILLED_AFTER_THREE_SHARDS = """
import os, signal, sys
from pathlib import Path
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings

def progress(now):
    if now.shards == 3:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    sources, output, workers = sys.argv[1:]
    prepare(Settings((Path(sources),), "bytes", Path(output), part_bytes=4_000, workers=int(workers)), progress)
"""


BAD = {
    "no text": ("a.txt", b"one\ntwo\n\xff\xfe\n", "a.txt: line 3 is no UTF-8 text (byte 0xff)"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text"\n', "a.jsonl: line 2 is not JSON"),
    "no object": ("a.jsonl", b"[1]\n", "a.jsonl: line 1 is a list, expected an object with `text`"),
    "no field": ("a.jsonl", b'{"text": "a"}\n\n{"body": 1}\n', "line 3 has no text in `text`; it has 'body'"),
    "depth": ("a.jsonl", b"[" * 100_000 + b"\n", "line 1 is not JSON: it is nested too deeply"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 holds half a character"),
    "no gzip": ("a.txt.gz", b"plain", "a.txt.gz is no whole gzip file"),
    "cut gzip": ("a.txt.gz", gzip.compress(bytes(range(100)) * 9)[:-9], "a.txt.gz is no whole gzip file"),
    "nothing": ("a.txt", b"", "1 files hold no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_with_file_and_line(case, tmp_path, tokenizer, capfd):
    name, content, sentence = BAD[case]
    (tmp_path / name).write_bytes(content)
    output = tmp_path / "corpus"
    arguments = ["data", "prepare", str(tmp_path / name), "--tokenizer", str(tokenizer), "--output", str(output)]
    assert main([*arguments, "--workers", "1"]) == 1
    assert sentence in capfd.readouterr().err.splitlines()[-1]
    assert not output.exists()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return file.getvalue()


def of_numpy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


def arrow(stream: bool) -> bytes:
    import pyarrow

    table = pyarrow.table({"text": ["a"]})
    file = io.BytesIO()
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


NO_TEXT = {
    "a.jsonl.zst": (lambda: b"\x28\xb5\x2f\xfd\x04\x58", "is of the kind Zstandard; decompress it"),
    "a.txt.bz2": (lambda: bz2.compress(b"text"), "is of the kind bzip2; decompress it"),
    "empty.bz2": (lambda: bz2.compress(b""), "is of the kind bzip2; decompress it"),
    "a.txt.xz": (lambda: lzma.compress(b"text"), "is of the kind xz; decompress it"),
    "a.zip": (zipped, "is of the kind zip; extract its files"),
    "a.tar": (tar, "is of the kind tar; extract its files"),
    "a.tar.gz": (lambda: gzip.compress(tar()), "is of the kind tar inside of gzip; extract its files"),
    "a.txt": (lambda: gzip.compress(b"text"), "is of the kind gzip; call it NAME.gz"),
    "a.arrow": (lambda: arrow(stream=False), "is of the kind Arrow; write its table as NAME.parquet"),
    "b.arrow": (lambda: arrow(stream=True), "is of the kind Arrow; write its table as NAME.parquet"),
    "a.npy": (of_numpy, "is of the kind NumPy; it holds numbers and no text"),
    "a.bin": (lambda: np.arange(9, dtype="<u2").tobytes(), "is no text by its name"),
    "a.jsonl": (zipped, "is of the kind zip; extract its files"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused_by_what_it_is(name: str, tmp_path: Path) -> None:
    content, sentence = NO_TEXT[name]
    (tmp_path / name).write_bytes(content())
    with pytest.raises(CorpusError, match=sentence):
        prepare(Settings((tmp_path / name,), "bytes", tmp_path / "corpus"))
    assert not (tmp_path / "corpus.partial").exists()


def test_the_line_is_right_in_the_midst_of_a_file_that_is_cut(tmp_path: Path) -> None:
    lines = [json.dumps({"text": sentences(at)}) for at in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{", *lines]))
    with pytest.raises(CorpusError, match=r"a\.jsonl: line 201 is not JSON"):
        prepare(Settings((tmp_path / "a.jsonl",), "bytes", tmp_path / "corpus", part_bytes=10_000, workers=2))


def test_what_cannot_be_begun_is_reported(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n" * 100)
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    asked = {"sources": (tmp_path / "a.txt",), "tokenizer": "bytes", "output": tmp_path / "out"}
    for changes, sentence in [
        ({"sources": (tmp_path / "missing",)}, "missing does not exist"),
        ({"sources": (tmp_path / "empty",)}, "holds no file that matches"),
        ({"sources": (tmp_path,)}, "which is read: write to another folder"),
        ({"tokenizer": str(tmp_path / "none.json")}, "none.json cannot be read"),
        ({"tokenizer": str(tmp_path / "bad.json")}, "bad.json is no tokenizer.json"),
        ({"end_of_document": "256"}, "--end-of-document: '256' is no token of bytes, nor a number below 256"),
        ({"begin_of_document": "<s>"}, "--begin-of-document: '<s>' is no token of bytes, nor a number below 256"),
        ({"output": tmp_path / "a.txt"}, "exists: name another folder"),
    ]:
        with pytest.raises(CorpusError, match=sentence):
            prepare(Settings(**(asked | changes)))
    # Begun with one tokenizer, not continued with another.
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(CorpusError, match="not JSON"):
        prepare(Settings(**(asked | {"sources": (tmp_path / "b.jsonl",)})))
    with pytest.raises(CorpusError, match="was started with other sources"):
        prepare(Settings(**asked))


def test_a_spelled_special_token_is_refused_unless_the_user_says_what_it_is(tmp_path: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(trained_tokenizer())
    library.no_truncation()
    source = tmp_path / "a.jsonl"
    texts = ["the fox", "the <end> runs"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    asked = {"sources": (source,), "tokenizer": str(tokenizer), "output": tmp_path / "corpus", "segment_bytes": 20}
    with pytest.raises(CorpusError, match=r"a\.jsonl: line 2 has '<end>', a special token .* --special-tokens"):
        prepare(Settings(**asked))
    # What was finished until then has none: it goes on, and from there on the answer is kept.
    first = tmp_path / "corpus.partial" / "segments-20" / "000000-000000"
    assert first.exists()
    (tmp_path / "b.txt").write_text("one\n<end>\n")
    with pytest.raises(CorpusError, match=r"b\.txt: line 2 has '<end>'"):
        prepare(Settings(**(asked | {"sources": (tmp_path / "b.txt",), "output": tmp_path / "other"})))
    for mode in (SpecialTokens.ENCODE, SpecialTokens.TEXT):
        library.encode_special_tokens = mode is SpecialTokens.TEXT
        output = tmp_path / ("corpus" if mode is SpecialTokens.ENCODE else "as-text")
        prepare(Settings(**(asked | {"output": output}), special_tokens=mode))
        assert tokens_of(output) == [token for text in texts for token in library.encode(text).ids]
        assert (library.token_to_id("<end>") in tokens_of(output)) == (mode is SpecialTokens.ENCODE)


def test_an_unknown_token_that_no_text_spells_is_not_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"[UNK]": 0, "fox": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens([AddedToken("[UNK]", special=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("fox bear")
    prepare(Settings((tmp_path / "a.txt",), str(tmp_path / "tokenizer.json"), tmp_path / "corpus"))
    assert tokens_of(tmp_path / "corpus") == [1, 0]


def damage(path: Path, at: int = 0, value: bytes = b"\xff\xff") -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)


def test_verify_names_the_file_that_is_not_as_it_was_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = prepared(tmp_path)
    assert main(["data", "verify", str(folder)]) == 0
    assert main(["data", "inspect", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["vocabulary"] == 256
    damage(folder / "shard-000000.tokens", 100, b"zz")
    assert main(["data", "verify", str(folder)]) == 1
    assert "shard-000000.tokens has other bytes than were written" in capfd.readouterr().err


def test_a_full_disk_is_reported_and_the_same_command_goes_on(tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "sources", lines=4000)
    whole = tmp_path / "whole"
    prepare(Settings((sources,), "bytes", whole, part_bytes=100_000))
    with small_disk(tmp_path / "disk", "8m") as disk:
        settings = Settings((sources,), "bytes", disk / "corpus", part_bytes=100_000)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(disk_room(disk) - 700_000))
        with pytest.raises(CorpusError, match=r"no room in .* run the same command again"):
            prepare(settings)
        ballast.unlink()
        progress = []
        prepare(settings, progress.append)
        assert progress[0].shards > 0
        assert content_of(settings.output) == content_of(whole)


def disk_room(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_tables_and_sentencepiece(tmp_path: Path) -> None:
    import pyarrow
    import sentencepiece
    from pyarrow import parquet

    texts = [sentences(at) for at in range(300)]
    prefix = tmp_path / "own"
    (tmp_path / "texts").write_text("".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"), model_prefix=str(prefix), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    library = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    sources = tmp_path / "sources"
    sources.mkdir()
    parquet.write_table(pyarrow.table({"body": texts, "id": range(300)}), sources / "a.parquet", row_group_size=50)
    settings = Settings(
        (sources,), f"{prefix}.model", tmp_path / "corpus", field="body", end_of_document="</s>", part_bytes=5_000
    )
    assert len(prepare(settings).shards) > 1
    assert tokens_of(settings.output) == [
        token for text in texts for token in [*library.encode(text), library.eos_id()]
    ]
    parquet.write_table(pyarrow.table({"body": ["a", None]}), sources / "a.parquet")
    for field, sentence in (("text", "has no column `text`; it has 'body'"), ("body", "row 2 has no `body`")):
        with pytest.raises(CorpusError, match=sentence):
            prepare(Settings((sources,), "bytes", tmp_path / field, field=field))
    (sources / "a.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(CorpusError, match=r"a\.parquet is no sound Parquet file"):
        prepare(Settings((sources,), "bytes", tmp_path / "none"))
