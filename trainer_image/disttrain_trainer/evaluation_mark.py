"""Mark of an evaluation that ended an attempt: the job continues without evaluation, and does not fail again.

Where ranks talk to each other while they evaluate, one that fails leaves the others waiting, and the attempt cannot be
rescued. The mark lies beside the checkpoints, and belongs to the job that wrote it.
"""

import sys
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from disttrain_api.report import MAX_SENTENCE
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.files import read_bounded, write_atomically

MARK_FILE = "evaluation-failed.json"
_MAX_BYTES = 16 * MAX_SENTENCE


class Mark(BaseModel):
    """Content of the file."""

    uid: Annotated[str, Field(max_length=64)]
    """Uid of the job."""
    message: Annotated[str, Field(max_length=MAX_SENTENCE)]


def read_mark(config: Config) -> str | None:
    """Return why this job evaluates no more, and where that is written; None: it evaluates."""
    if config.checkpoint_folder is None:
        return None
    path = config.checkpoint_folder / MARK_FILE
    try:
        mark = Mark.model_validate_json(read_bounded(path, _MAX_BYTES))
    except (OSError, ValidationError):
        return None
    return f"an earlier attempt ended because {mark.message} (see {path})" if mark.uid == config.job.uid else None


def write_mark(config: Config, message: str) -> None:
    """Let later attempts go without evaluation. Without storage there is no place for it; they then fail alike."""
    if config.checkpoint_folder is None:
        return
    path = config.checkpoint_folder / MARK_FILE
    try:
        write_atomically(path, Mark(uid=config.job.uid, message=message[:MAX_SENTENCE]).model_dump_json())
    except OSError as error:
        print(f"disttrain: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
