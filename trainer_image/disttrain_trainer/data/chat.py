"""Conversations as sequences of unlike lengths, in which only what the assistant says is to be predicted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from disttrain_api.chat import ChatConfig, LongConversations
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.chats.lines import Conversation, read_conversations
from disttrain_trainer.data.chats.packing import best_fit_decreasing
from disttrain_trainer.data.chats.template import ChatTokenizer
from disttrain_trainer.data.packed import Packed, join
from disttrain_trainer.data.sampler import permute
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import DataNotFound

_AT_ONCE = 256
"""Conversations that are tokenised together."""


class Conversations(Dataset[tuple[Tensor, Tensor]]):
    """Sample: all tokens but the last as input, each one's successor as target, IGNORED where it is not the
    assistant's; both [T], int64."""

    def __init__(self, tokenised: Tokenised, numbers: NDArray[np.int64]) -> None:
        self.tokenised, self.numbers = tokenised, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = self.numbers[index]
        start, stop = self.tokenised.starts[number : number + 2]
        tokens = torch.from_numpy(self.tokenised.tokens[start:stop].astype(np.int64))
        counted = torch.from_numpy(self.tokenised.counted[start + 1 : stop])
        return tokens[:-1], tokens[1:].where(counted, IGNORED)

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sample's input."""
        starts = self.tokenised.starts
        return starts[self.numbers + 1] - starts[self.numbers] - 1


class PackedConversations(Dataset[Packed]):
    """Sample: several whole conversations in a sequence of `length` tokens."""

    def __init__(self, conversations: Conversations, length: int) -> None:
        self.conversations, self.length = conversations, length
        self.packs = best_fit_decreasing(conversations.lengths(), length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Packed:
        return join([self.conversations[number] for number in self.packs[index]], self.length)


@dataclass(frozen=True)
class Tokenised:
    """All conversations, one after the other."""

    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_]
    """Whether each token is the assistant's."""
    starts: NDArray[np.int64]
    """The first token of each conversation, and the number of all."""

    def __len__(self) -> int:
        return len(self.starts) - 1


def load(config: ChatConfig) -> Datasets:
    """Training and held-out conversations. Raises DataNotFound or InvalidConfiguration naming the file."""
    tokenizer = ChatTokenizer(Path(config.tokenizer), config.template_arguments)
    tokenised, notes = _tokenised(read_conversations(Path(config.path)), tokenizer, config)
    training, held_out = (Conversations(tokenised, numbers) for numbers in _split(len(tokenised), config))
    counts = f"{len(training)} conversations are trained on, {len(held_out)} held out"
    notes.append(f"{counts}: {len(tokenised.tokens)} tokens, of which {int(tokenised.counted.sum())} count in the loss")
    vocabulary, fingerprint = int(tokenised.tokens.max()) + 1, _fingerprint(tokenised, held_out.numbers)
    if not config.packing:
        return Datasets(
            training,
            held_out if len(held_out) else None,
            vocabulary,
            fingerprint,
            longest=config.sequence_length,
            notes=notes,
        )
    packed, kept = (PackedConversations(part, config.sequence_length) for part in (training, held_out))
    filled = training.lengths().sum() / (len(packed) * config.sequence_length)
    notes.append(
        f"{len(training)} conversations are packed into {len(packed)} samples of {config.sequence_length} tokens, of "
        f"which {100 * (1 - filled):.1f} % are padding; {len(held_out)} held-out ones into {len(kept)}"
    )
    return Datasets(packed, kept if len(kept) else None, vocabulary, fingerprint, notes=notes, packed=True)


def _tokenised(
    conversations: Iterable[Conversation], tokenizer: ChatTokenizer, config: ChatConfig
) -> tuple[Tokenised, list[str]]:
    """Return the tokens, and what became of long conversations."""
    most, kept, long, silent = config.sequence_length, _Kept(), _Long(), 0
    for block in _blocks(conversations):
        for conversation, (tokens, counted) in zip(block, tokenizer.encode(block), strict=True):
            # Nothing predicts the first token.
            if not counted[1:].any():
                raise DataNotFound(
                    f"`training.data.config.path`: {conversation.place}: the chat template writes nothing of what the "
                    "assistant says: remove the line, or use another template"
                )
            if len(tokens) > most:
                long.add(conversation, len(tokens))
                if config.long_conversations is not LongConversations.TRUNCATE:
                    continue
                if not counted[1:most].any():
                    silent += 1
                    continue
            kept.add(tokens[:most], counted[:most])
    found = kept.joined()
    seen = len(found) + silent + (0 if config.long_conversations is LongConversations.TRUNCATE else long.count)
    notes = []
    if long.count:
        what = f"{long.count} of {seen} conversations have more than {most} tokens, the longest {long.most}"
        if config.long_conversations is LongConversations.REFUSE:
            raise DataNotFound(
                f"`training.data.config.sequenceLength`: {what}; the first is {long.first}. Raise it, or set "
                "`longConversations` to Truncate or LeaveOut"
            )
        cut = config.long_conversations is LongConversations.TRUNCATE
        notes.append(f"{what}: {'their end is cut off' if cut else 'they are left out'}")
    if silent:
        notes.append(f"{silent} of these say nothing of the assistant's in their first {most} tokens and are left out")
    if not len(found):
        raise DataNotFound(
            f"`training.data.config.path`: {config.path} has no conversation" + (f": {notes[0]}" if notes else "")
        )
    return found, notes


class _Kept:
    """Tokens of conversations, to be joined."""

    def __init__(self) -> None:
        self._tokens: list[NDArray[np.int32]] = []
        self._counted: list[NDArray[np.bool_]] = []

    def add(self, tokens: NDArray[np.int32], counted: NDArray[np.bool_]) -> None:
        self._tokens.append(tokens)
        self._counted.append(counted)

    def joined(self) -> Tokenised:
        starts = np.cumsum([0, *map(len, self._tokens)], dtype=np.int64)
        return Tokenised(
            np.concatenate([np.empty(0, np.int32), *self._tokens]),
            np.concatenate([np.empty(0, np.bool_), *self._counted]),
            starts,
        )


class _Long:
    """Conversations that are too long."""

    count, most, first = 0, 0, ""

    def add(self, conversation: Conversation, tokens: int) -> None:
        self.count, self.most, self.first = self.count + 1, max(self.most, tokens), self.first or conversation.place


def _blocks(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    rest = iter(conversations)
    while block := list(islice(rest, _AT_ONCE)):
        yield block


def _split(size: int, config: ChatConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the conversations to train on and those held out, both in the order of the files."""
    held_out = 0
    if config.held_out_fraction:
        held_out = max(1, round(size * config.held_out_fraction))
    if held_out >= size:
        raise DataNotFound(
            f"`training.data.config.heldOutFraction`: {config.held_out_fraction} of {size} conversations leaves none "
            "to train on: lower it"
        )
    order = permute(np.arange(size), size, config.split_seed, 0)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _fingerprint(tokenised: Tokenised, held_out: NDArray[np.int64]) -> str:
    """Return what tells this data from other: its tokens, whichever file, tokenizer or template they are of."""
    digest = hashlib.sha256()
    for part in (tokenised.tokens, tokenised.counted, tokenised.starts, held_out):
        digest.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()
