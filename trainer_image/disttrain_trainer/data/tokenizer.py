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
    """Without special tokens other than those that a text spells out."""
    decode: Callable[[Sequence[int]], str]
    end: int | None = None
    """The token that ends a text; None where there is none."""


def load_codec(field: str, folder: str | None) -> Codec:
    """Return the codec of the folder that `field` names, without one that of bytes. Raises InvalidConfiguration or
    DataNotFound."""
    return Codec(_bytes_of, _text_of) if folder is None else _codec_of(field, Path(folder))


def _codec_of(field: str, folder: Path) -> Codec:
    tokenizer = load_tokenizer(field, folder)

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
        return [np.array(tokens, np.int32) for tokens in found]

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    end = tokenizer.eos_token_id
    return Codec(encode, decode, end if isinstance(end, int) else None)


def _bytes_of(texts: list[str]) -> list[Tokens]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def _text_of(tokens: Sequence[int]) -> str:
    """Return the text of bytes; what is none becomes a replacement character."""
    return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens).decode(errors="replace")
