"""Small corpora for tests."""

import contextlib
import hashlib
import json
import os
from functools import cache
from pathlib import Path

import psutil

from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings
from disttrain_trainer.data.corpora.corpus import open_corpus
from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.spans import split
from disttrain_trainer.data.corpora.stream import TokenStream

TEXT = "the quick brown fox jumps over a lazy dog and naïve 犬 runs home"
WORDS = TEXT.split()


def sentences(number: int) -> str:
    """Return some text that differs from number to number."""
    return " ".join(WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(5 + number % 40)) + ".\n"


@cache
def trained_tokenizer() -> str:
    """Return a tokenizer.json: byte pairs of the texts above, and a token that ends documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([sentences(number) for number in range(100)], trainer)
    # What a model's file may ask for, and a corpus must not do.
    tokenizer.enable_truncation(4)
    return tokenizer.to_str()


def write_sources(folder: Path, files: int = 3, lines: int = 400) -> Path:
    """Write files of JSON lines and of text; return their folder."""
    folder.mkdir(parents=True)
    for file in range(files):
        rows = [json.dumps({"text": sentences(file * lines + line), "id": line}) for line in range(lines)]
        (folder / f"{file}.jsonl").write_text("\n".join(rows) + "\n")
        (folder / f"{file}.txt").write_text("".join(sentences(line) for line in range(file * 50)))
    return folder


def prepared(folder: Path, text: bytes | None = None, **settings: object) -> Path:
    """Return a corpus of bytes: of `text`, or of what `write_sources` writes."""
    if text is None:
        source = write_sources(folder / "sources")
    else:
        source = folder / "source.txt"
        source.write_bytes(text)
    output = folder / "corpus"
    prepare(Settings(**{"sources": (source,), "tokenizer": "bytes", "output": output, **settings}))  # type: ignore[arg-type]
    return output


def tokens_of(folder: Path) -> list[int]:
    """Return all tokens of a corpus in order."""
    corpus, files = open_corpus(folder), NumberFiles()
    stream = TokenStream(split(corpus.shards, 0.0, files)[0], corpus.vocabulary, files)
    return stream.read(0, len(stream)).tolist()


def content_of(folder: Path) -> dict[str, str]:
    """Return the digest of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def session_lives(session: int) -> bool:
    """Return whether a process of this session runs."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False
