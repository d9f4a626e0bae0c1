"""Texts as tokens and back: by a tokenizer of Hugging Face's transformers, from a folder, or as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILE = "tokenizer.json"
_MAX_FILE_BYTES = 200_000_000


def load_tokenizer(field: str, folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the folder that `field` names. Raises InvalidConfiguration or DataNotFound."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise InvalidConfiguration(
            f"`{field}`: the library transformers is not in the image; install `disttrain[hf]`"
        ) from error
    file = folder / _FILE
    if not file.is_file():
        raise DataNotFound(f"`{field}`: {file} does not exist (from {Path.cwd()}), expected a tokenizer's folder")
    if file.stat().st_size > _MAX_FILE_BYTES:
        raise DataNotFound(f"`{field}`: {file} has more than {_MAX_FILE_BYTES} bytes, which no tokenizer has")
    try:
        # This class and no other: code that comes with a tokenizer is not executed.
        found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise DataNotFound(f"`{field}`: {folder} is no tokenizer's folder: {one_line(error):.300}") from error
    return found


Tokens: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True)
class Codec:
    """How texts become tokens, and tokens texts."""

    encode: Callable[[list[str]], list[Tokens]]
    """With the special tokens that the tokenizer puts before a text, and those that a text spells out."""
    decode: Callable[[Sequence[int]], str]
    end: int | None = None
    """The token that ends a text; None where there is none."""
    begin: int | None = None
    """The token that stands for no text at all, which a model can go on from; None where there is none."""


def load_codec(field: str, folder: str | None) -> Codec:
    """Return the codec of the folder that `field` names, without one that of bytes. Raises InvalidConfiguration or
    DataNotFound."""
    return Codec(_bytes_of, _text_of) if folder is None else _codec_of(field, Path(folder))


def _codec_of(field: str, folder: Path) -> Codec:
    tokenizer = load_tokenizer(field, folder)
    before = _before_texts(tokenizer)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    end = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None
    begin = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else end
    spelled = None if begin is None else decode([begin])

    def encode(texts: list[str]) -> list[Tokens]:
        try:
            found = tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        except Exception as error:
            raise InvalidConfiguration(
                f"`{field}`: the tokenizer in {folder} cannot tokenise a text: {type(error).__name__}: "
                f"{one_line(error):.300}"
            ) from error
        # As lm-evaluation-harness: a text that spells out what begins it, as chat templates do, gets it no second time.
        begun = [spelled is not None and text.startswith(spelled) for text in texts]
        return [np.array(row if whole else [*before, *row], np.int32) for row, whole in zip(found, begun, strict=True)]

    return Codec(encode, decode, end, begin)


def _before_texts(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the special tokens that a tokenizer puts before each text.

    Those behind it are of no use here: after a token that ends a text, nothing is its continuation.
    """
    from tokenizers import Tokenizer, models

    rule = tokenizer.backend_tokenizer.post_processor
    if rule is None:
        return []
    # Where the text is among special tokens is seen by one that certainly has a token, which a vocabulary's may not.
    text = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    found = rule.process(text, None, True)
    return list(found.ids[: found.special_tokens_mask.index(0)])


def _bytes_of(texts: list[str]) -> list[Tokens]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def _text_of(tokens: Sequence[int]) -> str:
    """Return the text of bytes; what is none becomes a replacement character."""
    return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens).decode(errors="replace")
