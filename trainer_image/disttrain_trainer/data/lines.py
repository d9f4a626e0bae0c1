"""Texts of JSON Lines files as sequences that predict their next token, tokenised while they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from disttrain_api.lines import LinesConfig
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.data.texts import lanes
from disttrain_trainer.data.texts.blocks import Blocks, open_blocks
from disttrain_trainer.data.texts.lanes import Tokens, cut
from disttrain_trainer.data.texts.whole import Whole
from disttrain_trainer.data.tokenizer import load_tokenizer
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration, one_line, shown

_FIELD = "training.data.config"
Encode = Callable[[list[str]], list[Tokens]]


def load(config: LinesConfig) -> Datasets:
    """Return training samples that are iterated, and held-out ones. Raises DataNotFound or InvalidConfiguration."""
    blocks = open_blocks(config.path, config.field)
    encode, vocabulary, digest = _bytes(config) if config.tokenizer is None else _tokens(config, Path(config.tokenizer))

    def read(number: int) -> list[Tokens]:
        texts = blocks.texts(number)
        return encode(texts) if texts else []

    held_out, kept = _held_out(read, len(blocks), config)
    count = len(blocks) - kept
    texts = (tokens for number in range(count) for tokens in read(number) if len(tokens))
    first = next(texts, None)
    if first is None:
        raise DataNotFound(f"`{_FIELD}.path`: {config.path} has no text to train on")
    samples: Whole | lanes.Lanes
    if count < lanes.LANES:
        samples = Whole(np.concatenate([first, *texts]), config.sequence_length, config.order_seed)
        when = "before the first step"
    else:
        samples = lanes.Lanes(read, count, config.sequence_length, config.order_seed)
        when = "while they are read"
    size = sum(source.size for source in blocks.sources)
    return Datasets(
        Stream(samples, "`training.data.name` lines"),
        held_out or None,
        vocabulary,
        _fingerprint(blocks, config, digest),
        notes=[f"{len(blocks.sources)} files of {size} bytes are tokenised {when}"],
    )


def _held_out(
    read: Callable[[int], list[Tokens]], blocks: int, config: LinesConfig
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Return the samples, and the number of blocks that they are of."""
    if not config.held_out_samples:
        return [], 0
    texts: list[Tokens] = []
    wanted, kept = config.held_out_samples * config.sequence_length + 1, 0
    # One block at least stays for training.
    while sum(map(len, texts)) < wanted and kept < blocks - 1:
        kept += 1
        texts = [*read(blocks - kept), *texts]
    found = cut(iter(texts), config.sequence_length, config.held_out_samples)
    if len(found) < config.held_out_samples:
        raise DataNotFound(
            f"`{_FIELD}.heldOutSamples`: {config.path} has {len(found)} samples beside the first 64 KiB, which are "
            f"trained on, expected {config.held_out_samples}: lower it"
        )
    return found, kept


def _bytes(config: LinesConfig) -> tuple[Encode, int, str]:
    for field, token in _around(config).items():
        if token is not None:
            raise InvalidConfiguration(f"`{_FIELD}.{field}` needs `tokenizer`: bytes have no token for it")
    return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts], 256, ""


def _tokens(config: LinesConfig, folder: Path) -> tuple[Encode, int, str]:
    """Return what encodes texts, the number of tokens, and what tells this tokenizer from others."""
    field = f"{_FIELD}.tokenizer"
    tokenizer = load_tokenizer(field, folder)

    def number(name: str, token: str) -> int:
        found = tokenizer.get_vocab().get(token)
        if found is None:
            raise InvalidConfiguration(f"`{_FIELD}.{name}`: '{shown(token)}' is no token of {folder}")
        return int(found)

    begin, end = ([] if token is None else [number(name, token)] for name, token in _around(config).items())

    def encode(texts: list[str]) -> list[Tokens]:
        try:
            # What spells a special token in a text is text: else a document could end wherever its author likes.
            rows = tokenizer(
                texts,
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        except Exception as error:
            raise InvalidConfiguration(
                f"`{field}`: the tokenizer in {folder} cannot tokenise a text: {type(error).__name__}: "
                f"{one_line(error):.300}"
            ) from error
        return [np.array(begin + row + end, np.int32) for row in rows]

    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return encode, max(tokenizer.get_vocab().values()) + 1, digest


def _around(config: LinesConfig) -> dict[str, str | None]:
    """Return the tokens before and after each text, by their fields."""
    return {"beginOfDocument": config.begin_of_document, "endOfDocument": config.end_of_document}


def _fingerprint(blocks: Blocks, config: LinesConfig, digest: str) -> str:
    """Return what tells this data from other: names and sizes of files, and how they are read."""
    files = (f"{source.name} {source.size}" for source in blocks.sources)
    order = (config.field, config.sequence_length, config.order_seed, config.end_of_document, config.held_out_samples)
    begin = [] if config.begin_of_document is None else [config.begin_of_document]
    return hashlib.sha256("\n".join([digest, repr(order), *begin, *files]).encode()).hexdigest()
