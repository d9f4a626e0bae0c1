"""Roll back: after too many skipped steps, the next attempt resumes with the samples that come after them.

Without it the next attempt would meet the same samples in the same state, and fail at the same step. A mark beside the
checkpoints says up to where samples are passed over. It belongs to the job that wrote it, and says nothing to
checkpoints that are written later: their data stand behind it.

If the job fails so again and has written no checkpoint since, the parameters had gone wrong before the one to which it
was rolled back. Then the mark also says that this one is set aside, and the next attempt begins with an earlier one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from disttrain_api.training import OnMostInRow
from disttrain_trainer.checkpoint.checkpoints import Checkpoints
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.data.stream import Stream, StreamSampler
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import NonFiniteLoss
from disttrain_trainer.runtime.files import read_bounded, write_atomically
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import keeping_random_state
from disttrain_trainer.state import State

MARK_FILE = "rolled-back.json"
_MAX_BYTES = 4096
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class Mark(BaseModel):
    """Content of the file."""

    uid: Annotated[str, Field(max_length=64)]
    """Uid of the job."""
    step: _Count
    """The last of the steps whose gradients were not used."""
    epoch: _Count
    position: _Count
    """With `epoch`, the cursor behind the samples of this step."""
    skipped: _Count = 0
    """How many were skipped until then. A checkpoint before them does not know of them."""
    count: Annotated[int, Field(ge=1, lt=2**31)] = 1
    """How often the job was rolled back."""
    rolled_to: _Count | None = None
    """Step of the newest checkpoint when samples were passed over for this. None: they were not, or there was none."""
    before: _Count | None = None
    """The next attempt begins with a checkpoint before this step, if there is one. None: with any."""

    @property
    def cursor(self) -> Cursor:
        """Where the samples begin that are not passed over."""
        return Cursor(self.epoch, self.position)


@contextmanager
def marking(config: Config, world: World, state: State, checkpoints: Checkpoints | None) -> Iterator[None]:
    """Where too many steps in a row are skipped, and the job asks for it, leave the mark to the next attempt."""
    try:
        yield
    except NonFiniteLoss as error:
        if _rolls_back(config) and world.first and checkpoints is not None:
            _mark(config, state, checkpoints, error)
        raise


def read_mark(config: Config, world: World) -> Mark | None:
    """Return the mark of this job; None where there is none. All ranks together."""
    if not _rolls_back(config):
        return None
    text = world.from_first(lambda: (mark := _read(config)) and mark.model_dump_json(), str | None)
    return None if text is None else Mark.model_validate_json(text)


def step_back(mark: Mark | None, config: Config, world: World, checkpoints: Checkpoints) -> None:
    """Set aside the checkpoints that the mark calls useless, where there is a sound one before them. All ranks
    together, before any is restored."""
    if mark is None or mark.before is None:
        return
    checkpoints.set_aside_from(mark.before)
    if world.first:
        # Those that are written from now on have other parameters.
        _write(config, mark.model_copy(update={"before": None}))


def pass_over_marked(
    mark: Mark | None, config: Config, world: World, state: State, newest: Callable[[], int | None]
) -> None:
    """Move the state's data behind the mark, if there is one ahead. All ranks together, once a checkpoint is restored.

    newest: returns, on rank 0, the step of the newest checkpoint. Raises what an iterable data set raises.
    """
    if mark is None:
        return
    until, cursor, steps = mark.cursor, state.cursor, 0
    # The data may have changed: no more than a whole run is passed over.
    while _is_before(cursor, until) and steps < config.training.steps:
        cursor, steps = state.sampler.advance(cursor), steps + 1
    if not steps:
        return
    world.all_or_none(lambda: _read_on(state, cursor))
    state.cursor = cursor
    if world.first:
        _write(config, mark.model_copy(update={"before": None, "rolled_to": newest()}))
    if state.guard is not None:
        state.guard.skipped = max(state.guard.skipped, mark.skipped)
    log_first_rank(
        world,
        f"rolled back to step {state.step}: the next samples, of {steps} steps, are passed over, up to those of the "
        f"former step {mark.step}",
    )


def _rolls_back(config: Config) -> bool:
    settings = config.training.skip_steps
    return settings is not None and settings.on_most_in_row is OnMostInRow.ROLL_BACK


def _is_before(cursor: Cursor, other: Cursor) -> bool:
    return (cursor.epoch, cursor.position) < (other.epoch, other.position)


def _read_on(state: State, cursor: Cursor) -> None:
    """Read the samples before the cursor where data are iterated, which alone brings them there."""
    stream, sampler = state.data.training, state.sampler
    if not (isinstance(stream, Stream) and isinstance(sampler, StreamSampler)):
        return
    with keeping_random_state():
        first = sampler.number(cursor)
        for number in range(sampler.number(state.cursor), first):
            stream[number]
        # What looks at samples before the first step goes back to none that was passed over.
        stream.resume(first, stream.position_before(first))


def _read(config: Config) -> Mark | None:
    if config.checkpoint_folder is None:
        return None
    try:
        mark = Mark.model_validate_json(read_bounded(config.checkpoint_folder / MARK_FILE, _MAX_BYTES))
    except (OSError, ValidationError):
        return None
    return mark if mark.uid == config.job.uid else None


def _mark(config: Config, state: State, checkpoints: Checkpoints, error: NonFiniteLoss) -> None:
    """Write a mark behind the samples of the step that was judged last, which in most layouts has neither been made nor
    left behind."""
    former, behind = _read(config), state.sampler.advance(state.cursor)
    if error.behind is not None:
        behind = Cursor(*error.behind)
    before = None if former is None or checkpoints.writing else former.rolled_to
    # What was written since then has parameters of its own. A storage that does not answer must not hide the loss.
    newest = None
    with suppress(OSError):
        newest = checkpoints.newest()
    if newest != before:
        before = None
    skipped = 0 if state.guard is None else state.guard.skipped
    mark = Mark(
        uid=config.job.uid, step=error.step or state.step + 1, epoch=behind.epoch, position=behind.position,
        skipped=skipped, count=1 if former is None else former.count + 1, before=before,
    )  # fmt: skip
    _write(config, mark)


def _write(config: Config, mark: Mark) -> None:
    """Write the mark. Where that is not possible, the next attempt meets the same samples, or the same checkpoint."""
    assert config.checkpoint_folder is not None
    path = config.checkpoint_folder / MARK_FILE
    try:
        write_atomically(path, mark.model_dump_json())
    except OSError as error:
        print(f"disttrain: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
