"""`training.data.config` of conversations."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from disttrain_api.base import ApiModel

Path = Annotated[str, Field(min_length=1, max_length=4096)]


class LongConversations(StrEnum):
    """What becomes of conversations with more than `sequenceLength` tokens."""

    REFUSE = "Refuse"
    TRUNCATE = "Truncate"
    LEAVE_OUT = "LeaveOut"


class ChatConfig(ApiModel):
    """Conversations as JSON Lines, tokenised with the tokenizer's chat template; only what the assistant says counts in
    the loss. Needs the extra `hf`."""

    path: Path
    """A file of JSON Lines, or a folder with some (*.jsonl, *.ndjson); the same in every pod. A line has `messages`, a
    list of `{"role": …, "content": …}`, or `prompt` and `completion`."""
    tokenizer: Path
    """A folder with `tokenizer.json`, `tokenizer_config.json` and a chat template, as a model's is."""
    sequence_length: Annotated[int, Field(ge=2, le=1_000_000)] = 1024
    """The most tokens of a conversation. A batch is as long as its longest one, with `packing` as long as this."""
    packing: bool = False
    """Whether a sample is a sequence of several whole conversations, each of which attends to itself alone, as with
    `documentMask` of a corpus."""
    long_conversations: LongConversations = LongConversations.REFUSE
    """What becomes of longer ones. Refuse: the job fails before its first step; Truncate: their end is cut off."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """Part of the conversations that is kept for evaluation, one at least. 0: none."""
    split_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the split."""
    template_arguments: dict[str, Any] = {}
    """Variables that the template reads, such as `enable_thinking`."""
