"""Settings of `disttrain data prepare`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from disttrain_trainer.data.corpora.manifest import BYTES

DEFAULT_PART_BYTES = 2**28
SEGMENT_BYTES = 2**24


class SpecialTokens(StrEnum):
    """What becomes of text that spells a special token of a `tokenizer.json`."""

    REFUSE = "refuse"
    ENCODE = "encode"
    """It is the token."""
    TEXT = "text"
    """It is encoded as any other text."""


@dataclass(frozen=True)
class Settings:
    """A preparation. What it writes depends on all of it but `workers` and `segment_bytes`."""

    sources: tuple[Path, ...]
    """Files, and folders whose files are read recursively."""
    tokenizer: str
    """A file, or `bytes`."""
    output: Path
    pattern: str = "*"
    """Which files of a folder are read, as a shell pattern for their names."""
    field: str = "text"
    """Where a line of JSON, or a row of a table, has its text."""
    end_of_document: str | None = None
    """Token after each document: its text, or its number."""
    begin_of_document: str | None = None
    """Token before each document, likewise."""
    special_tokens: SpecialTokens = SpecialTokens.REFUSE
    """What becomes of text that spells one."""
    part_bytes: int = DEFAULT_PART_BYTES
    """Source bytes of a shard, about."""
    workers: int = 1
    """Processes."""
    segment_bytes: int = SEGMENT_BYTES
    """Source bytes that a process turns into tokens at a time, about: what a kill can lose."""

    @property
    def partial(self) -> Path:
        """Folder of the corpus until it is complete."""
        return self.output.with_name(f"{self.output.name}.partial")

    @property
    def of_bytes(self) -> bool:
        """Whether each byte is a token."""
        return self.tokenizer == BYTES
