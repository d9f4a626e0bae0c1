"""Text becomes tokens, by a tokenizer's file or byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from disttrain.corpora.settings import Settings, SpecialTokens
from disttrain_trainer.data.corpora.manifest import BYTES, MAX_VOCABULARY, CorpusError, Tokenizer

BYTE_VALUES = 256
MAX_TOKENIZER_BYTES = 2**28
_ADVICE = {
    SpecialTokens.REFUSE: "remove it, or say with --special-tokens whether it is this token (encode) or text (text)",
    SpecialTokens.TEXT: "this tokenizer cannot encode it as text: remove it",
}


class Encoder(Protocol):
    """Tokens of texts, without any that mark a beginning or an end."""

    vocabulary: int
    """All tokens are below."""
    utf8: bool
    """Whether texts must be UTF-8."""

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger]]:
        """Return the tokens of each text. Raises SpelledTokenError."""
        ...

    def token(self, text: str) -> int | None:
        """Return the token with this text, None where there is none."""
        ...


class SpelledTokenError(Exception):
    """Text spells a special token, which it must not."""

    def __init__(self, text: int, token: str, advice: str) -> None:
        """text: number of the text among those that were given."""
        super().__init__(token)
        self.text, self.token, self.advice = text, token, advice


class ByteEncoder:
    """A byte is a token."""

    vocabulary = BYTE_VALUES
    utf8 = False

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def token(self, text: str) -> int | None:
        """Bytes have no names."""
        return None


class FileEncoder:
    """A `tokenizer.json`, as the library tokenizers writes it."""

    utf8 = True

    def __init__(self, name: str, content: bytes, special_tokens: SpecialTokens = SpecialTokens.REFUSE) -> None:
        """Raises CorpusError where `content`, the file `name`, is no tokenizer."""
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise CorpusError(f"{name} needs the library tokenizers: pip install 'disttrain[data]'") from error
        try:
            self._library: Any = Library.from_buffer(content)
        # The library raises a bare Exception.
        except Exception as error:
            raise CorpusError(f"{name} is no tokenizer.json: {error!s:.300}") from error
        # What a model's own file may ask for; a corpus is neither cut nor filled up.
        self._library.no_truncation()
        self._library.no_padding()
        self._special_tokens = special_tokens
        self._library.encode_special_tokens = special_tokens is SpecialTokens.TEXT
        self._special = {
            number: token.content for number, token in self._library.get_added_tokens_decoder().items() if token.special
        }
        # Numbers may have gaps.
        self.vocabulary = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocabulary <= MAX_VOCABULARY:
            raise CorpusError(f"{name} has {self.vocabulary} tokens, expected 1 to {MAX_VOCABULARY}")

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger]]:
        """Return the tokens of each text."""
        decoded = [text.decode() for text in texts]
        encoded = [
            np.array(found.ids, np.uint32)
            for found in self._library.encode_batch_fast(decoded, add_special_tokens=False)
        ]
        if self._special_tokens is not SpecialTokens.ENCODE:
            for number, (text, tokens) in enumerate(zip(decoded, encoded, strict=True)):
                self._require_no_special(number, text, tokens)
        return encoded

    def _require_no_special(self, number: int, text: str, tokens: NDArray[np.unsignedinteger]) -> None:
        found = np.unique(tokens[np.isin(tokens, list(self._special))]).tolist()
        # What a tokenizer does not know is a special token, too, which no text spells.
        if spelled := [name for name in map(self._special.__getitem__, found) if name in text]:
            raise SpelledTokenError(number, spelled[0], _ADVICE[self._special_tokens])

    def token(self, text: str) -> int | None:
        """Return the token with this text, None where there is none."""
        found: int | None = self._library.token_to_id(text)
        return found


def read_tokenizer(settings: Settings) -> bytes | None:
    """Return the tokenizer's file; None for bytes. Raises CorpusError."""
    if settings.of_bytes:
        return None
    path = Path(settings.tokenizer)
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CorpusError(f"{path} has more than {MAX_TOKENIZER_BYTES} bytes, which no tokenizer has")
        return path.read_bytes()
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}; name a tokenizer's file, or `bytes`") from error


class SentencePieceEncoder:
    """A `.model` file of SentencePiece."""

    utf8 = True

    def __init__(self, name: str, content: bytes) -> None:
        """Raises CorpusError where `content`, the file `name`, is no model."""
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise CorpusError(f"{name} needs the library sentencepiece: pip install 'disttrain[data]'") from error
        try:
            self._library: Any = SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError, TypeError) as error:
            raise CorpusError(f"{name} is no model of SentencePiece: {error!s:.300}") from error
        self.vocabulary: int = self._library.get_piece_size()
        if not 0 < self.vocabulary <= MAX_VOCABULARY:
            raise CorpusError(f"{name} has {self.vocabulary} tokens, expected 1 to {MAX_VOCABULARY}")

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger]]:
        """Return the tokens of each text."""
        return [np.array(self._library.encode(text.decode(), out_type=int), np.uint32) for text in texts]

    def token(self, text: str) -> int | None:
        """Return the token with this text, None where there is none."""
        found: int = self._library.piece_to_id(text)
        return found if self._library.id_to_piece(found) == text else None


ENCODERS: dict[str, Callable[[str, bytes, SpecialTokens], Encoder]] = {
    "tokenizers": FileEncoder,
    # It never takes text for a control token.
    "sentencepiece": lambda name, content, _: SentencePieceEncoder(name, content),
}
"""By the kind that the manifest says."""


def kind_of(settings: Settings) -> str:
    """Return which kind of tokenizer is asked for: SentencePiece's files end with .model."""
    if settings.of_bytes:
        return BYTES
    return "sentencepiece" if settings.tokenizer.endswith(".model") else "tokenizers"


def build_encoder(name: str, kind: str, content: bytes | None, special_tokens: SpecialTokens) -> Encoder:
    """Return the encoder of the content of a tokenizer's file, or of bytes where there is none. Raises CorpusError."""
    return ByteEncoder() if content is None else ENCODERS[kind](name, content, special_tokens)


def describe_tokenizer(settings: Settings, encoder: Encoder, content: bytes | None) -> Tokenizer:
    """Return what the manifest says of it. Raises CorpusError for tokens around documents that it does not know."""
    return Tokenizer(
        kind=kind_of(settings),
        sha256=None if content is None else hashlib.sha256(content).hexdigest(),
        vocabulary=encoder.vocabulary,
        end_of_document=_token("--end-of-document", settings.end_of_document, settings, encoder),
        begin_of_document=_token("--begin-of-document", settings.begin_of_document, settings, encoder),
    )


def _token(option: str, given: str | None, settings: Settings, encoder: Encoder) -> int | None:
    """Return the token that an option names by its text or number. Raises CorpusError."""
    if given is None:
        return None
    if (token := encoder.token(given)) is not None:
        return token
    if given.isascii() and given.isdigit() and len(given) < 10 and int(given) < encoder.vocabulary:
        return int(given)
    raise CorpusError(
        f"{option}: {given!r} is no token of {settings.tokenizer}, nor a number below {encoder.vocabulary}"
    )
