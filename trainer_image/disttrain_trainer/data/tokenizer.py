"""A tokenizer of Hugging Face's transformers, from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
