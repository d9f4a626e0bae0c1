"""Checkpoints in the format of torch.distributed.checkpoint, committed by a rename (objects: see object_steps.py).

Content of a `step-N` folder: model (by parameter name), optimizer state, loss scaler, data cursor, and of each rank its
random state, what compression has kept of its gradients, and the replica that it trains alone. Hyperparameters are not
taken from a checkpoint: the manifest's count.

A save in the background blocks training while the state is copied into the host's memory; a thread then writes and
commits the copy, over a process group of its own. One save at a time: the next one, the end and a stop wait for it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from disttrain_api.report import CheckpointReport
from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint import plans as checkpoint_plans
from disttrain_trainer.checkpoint.compatibility import (
    extra_state_in,
    names_of_all_ranks,
    require_model_fits,
    stored_shapes,
)
from disttrain_trainer.checkpoint.dedup import without_others
from disttrain_trainer.checkpoint.fence import Fence
from disttrain_trainer.checkpoint.kept_callbacks import restore_callbacks, saved_callbacks
from disttrain_trainer.checkpoint.kept_extra_state import (
    log_missing_extra_state,
    of_this_rank,
    require_extra_state,
    room_for_extra_state,
    take_extra_state,
)
from disttrain_trainer.checkpoint.kept_gradients import kept_gradients, restore_kept_gradients
from disttrain_trainer.checkpoint.kept_optimizer import (
    OPTIMIZER,
    log_fresh_parameters,
    restore_optimizer,
    room_for_optimizer,
    saved_optimizer,
)
from disttrain_trainer.checkpoint.kept_position import restore_position, saved_position
from disttrain_trainer.checkpoint.kept_replicas import restore_replica, saved_replica
from disttrain_trainer.checkpoint.kept_samples import log_changed_samples, require_same_settings, saved_samples
from disttrain_trainer.checkpoint.owned_steps import OwnedSteps
from disttrain_trainer.checkpoint.staging import HostCopier
from disttrain_trainer.checkpoint.step_manifest import Place, StepManifest
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.checkpoint.step_writer import StepWriter
from disttrain_trainer.checkpoint.storage import report_of, require_shared, steps_in
from disttrain_trainer.checkpoint.verify import latest_sound
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.parallel.data_parallel import share_buffers
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointMismatch, StorageFull, no_room
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import restore_saved_random_state, saved_random_state
from disttrain_trainer.state import State

_ALIKE = ("model", OPTIMIZER)
"""Parts that several ranks have the same tensors of."""


class Checkpoints:
    """The checkpoints of this job on its storage. Every method is called by all ranks together."""

    def __init__(self, folder: Place, config: Config, world: World) -> None:
        self._world = world
        self._settings = config.training.checkpoint or Checkpoint()
        self._attempt = config.attempt
        self._folders = steps_in(folder, config.job.uid)
        self._owned = OwnedSteps(self._folders, Fence(folder, config.job.uid, config.attempt), self._settings)
        self._number = 0
        self._copier = HostCopier(world.device) if config.saves_in_background else None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[CheckpointReport] | None = None
        self._adding: Future[None] | None = None
        self._restored: StepReader | None = None
        self.latest: CheckpointReport | None = None
        """The latest checkpoint that is known to be complete."""

    @classmethod
    def open(cls, folder: Place, config: Config, world: World) -> Checkpoints:
        """Take the folder over from earlier attempts and clean up what they left unfinished.

        Raises StorageNotShared, InvalidConfiguration (cannot write), Fenced or CheckpointsTaken.
        """
        checkpoints = cls(folder, config, world)
        require_shared(folder, world)
        checkpoints._number = world.from_first(checkpoints._owned.take_over, int)
        return checkpoints

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return step % self._settings.interval == 0

    def newest(self) -> int | None:
        """Return, on rank 0 alone, the step of the newest complete checkpoint, sound or not; None: there is none."""
        complete = self._folders.look().complete
        return complete[-1].step if complete else None

    def set_aside_from(self, step: int) -> None:
        """Set all checkpoints aside that are of this step or a later one, where there is a sound one before them."""
        try:
            found = latest_sound(self._folders, self._world, before=step)
        except CheckpointBroken:
            found = None
        if found is None:
            return

        def aside() -> list[str]:
            later = [one for one in self._folders.look().complete if one.step >= step]
            return [self._folders.set_aside(one.name) for one in later]

        names = ", ".join(self._world.from_first(aside, list[str]))
        log_first_rank(self._world, f"training went wrong before step {step}: its checkpoints are now {names}")

    def restore(self, state: State) -> CheckpointReport | None:
        """Load the latest checkpoint that is complete and sound into `state`; None where there is none.

        Raises CheckpointBroken, or CheckpointMismatch naming the first parameter that does not fit;
        InvalidConfiguration where the state could not come back from a checkpoint.
        """
        self._world.all_or_none(lambda: require_extra_state(state.module))
        found = latest_sound(self._folders, self._world)
        if found is None:
            return None
        path = self._folders.folder / found.name
        reader = StepReader(path)
        _load(state, reader, self._world)
        if state.step != found.step:
            raise CheckpointBroken(f"{path} holds step {state.step}: rename or remove it")
        restore_kept_gradients(state, reader, self._world)
        restore_replica(state, reader, self._world)
        restore_position(state, reader, self._world)
        self._restored = reader
        self.latest = report_of(state.step, path)
        return self.latest

    def restore_callbacks(self, state: State) -> None:
        """Give callbacks their state of the checkpoint that was restored, if any. Raises CheckpointMismatch."""
        reader, self._restored = self._restored, None
        if reader is not None:
            restore_callbacks(state, reader, self._world)

    def save(self, state: State, wait: bool) -> None:
        """Write and commit `step-N`, then delete what is neither among the latest nor the best ones to keep.

        Returns when that is done with `wait` or where saves are not asynchronous, else as soon as the state is copied.
        Does nothing where this step's checkpoint is the latest already.
        Raises StorageFull or Fenced on every rank, also where the save before this one failed so; nothing is committed
        then and the previous checkpoint stays.
        """
        self.settle()
        if self.latest is not None and self.latest.step == state.step:
            return
        state.callbacks.call("on_checkpoint", state)
        manifest = self._manifest(state.step)
        rank = self._world.rank
        # Each rank writes some of the tensors that are alike, so buffers must be alike, too.
        share_buffers(state.module, self._world)
        contents = contents_of(state, rank) | {OPTIMIZER: saved_optimizer(state)}
        contents |= kept_gradients(state, rank) | saved_replica(state, rank)
        contents |= saved_callbacks(state, rank) | saved_position(state, self._world)
        contents |= saved_samples(state, self._world)
        stages = None if state.pipeline is None else state.pipeline.stages.values()
        extra = of_this_rank(take_extra_state(contents["model"]), state.module, stages, self._world)
        contents |= {part: without_others(contents[part], self._world) for part in _ALIKE}
        contents["model"] |= extra
        if wait or self._copier is None:
            self.latest = self._write(contents, manifest)
        else:
            self._pending = self._writer.submit(self._write, self._copier.copy(contents), manifest)

    @property
    def writing(self) -> bool:
        """Whether a save in the background goes on, as far as this rank knows."""
        return self._pending is not None and not self._pending.done()

    @property
    def failed(self) -> bool:
        """Whether the save in the background has ended with an error on this rank; `settle` and `save` raise it."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def collect(self) -> bool:
        """Without waiting, and on this rank alone: whether a save in the background is now complete."""
        if self._pending is None or not self._pending.done() or self.failed:
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Wait for the save in the background. Raises what `save` does."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.latest = pending.result()
        if self._adding is not None:
            adding, self._adding = self._adding, None
            adding.result()

    def _write(self, contents: dict[str, Any], manifest: StepManifest) -> CheckpointReport:
        group = self._world.background
        partial = self._folders.partial(manifest.step, self._number)
        try:
            checkpoint_plans.save(contents, StepWriter(partial, manifest), group)
        except CheckpointException as failure:
            self._world.from_first(functools.partial(self._give_up, partial, failure), group=group)
            raise
        return self._world.from_first(lambda: self._commit(partial, manifest.step), CheckpointReport, group)

    def add_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Add to the checkpoint of `step`, if there is one, what an evaluation of this very state found.

        It is done behind a save in the background, and when this returns where there is none. What is then neither
        among the latest nor the best ones to keep is deleted.
        """
        # JSON knows no inf and nan.
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        if not self._world.first or not finite:
            return
        self._adding = self._writer.submit(self._add_figures, step, finite)
        if self._pending is None:
            self.settle()

    def figures(self, step: int) -> dict[str, float] | None:
        """Return what an evaluation has left in the complete checkpoint of `step`, empty where none has; None where
        there is no such checkpoint that could hold figures."""

        return self._world.from_first(lambda: self._owned.figures(step), dict[str, float] | None)

    def _add_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """On rank 0. Figures that cannot be written are missing; the checkpoint stays what it is."""
        try:
            self._owned.add_figures(step, figures)
        except Exception as error:
            # An object store has errors of its own kinds.
            print(f"disttrain: step-{step} is kept without its figures: {error}", file=sys.stderr, flush=True)

    def _manifest(self, step: int) -> StepManifest:
        return StepManifest(
            step=step,
            attempt=self._attempt,
            world_size=self._world.size,
            mesh=asdict(self._world.mesh),
        )

    def _commit(self, partial: Place, step: int) -> CheckpointReport:
        return report_of(step, self._owned.commit(partial, step))

    def _give_up(self, partial: Place, error: CheckpointException) -> None:
        """Remove what was written; say so where a full file system is the cause."""
        size = self._owned.give_up(partial)
        if any(no_room(cause) for cause, _ in error.failures.values()):
            raise StorageFull(
                f"no room for {partial.name.split('.')[0]} in {partial.parent} after {size} bytes; earlier checkpoints "
                "are untouched; ask for a larger volume in `storage`, or lower `training.checkpoint.keepLatest` from "
                f"{self._settings.keep_latest}"
            )


def contents_of(state: State, rank: int) -> dict[str, Any]:
    """Return the content of a checkpoint except the optimizer state; loading writes into the same objects."""
    return {
        "model": get_model_state_dict(state.module),
        "scaler": state.precision.scaler.state_dict() if state.precision.scaler else {},
        "guard": state.guard.state_dict() if state.guard else {},
        "train": {
            "step": state.step,
            "epoch": state.cursor.epoch,
            "position": state.cursor.position,
            "samples": state.sampler.size,
            **({} if state.data.fingerprint is None else {"corpus": _number_of(state.data.fingerprint)}),
        },
        "random": {str(rank): saved_random_state()},
    }


def _load(state: State, reader: StepReader, world: World) -> None:
    rank, path = world.rank, reader.place
    metadata = reader.read_metadata()
    contents = contents_of(state, rank)
    names = names_of_all_ranks(contents["model"], world)
    extra = room_for_extra_state(names, metadata, "model.")
    fresh = {name: contents["model"].pop(name) for name in extra_state_in(contents["model"])}

    def require_fit() -> None:
        advice = "use the model that wrote it, or another `training.checkpoint.folder`"
        require_model_fits(stored_shapes(metadata, "model."), contents["model"], names, path, advice)
        contents[OPTIMIZER] = room_for_optimizer(state, stored_shapes(metadata, f"{OPTIMIZER}."), path)

    world.all_or_none(require_fit)
    require_same_settings(state, reader, world)
    log_fresh_parameters(state, contents[OPTIMIZER], path, world)
    log_missing_extra_state(names, extra, path.name, world)
    contents["model"] |= {name: value for name, value in extra.items() if name in fresh}
    saved = metadata.state_dict_metadata
    # A larger world has ranks without a saved random state, another precision none for the scaler; a checkpoint that a
    # CPU has written has none of a GPU.
    own = {kind: value for kind, value in contents["random"][str(rank)].items() if f"random.{rank}.{kind}" in saved}
    contents["random"] = {str(rank): own}
    for part, present in (
        ("random", bool(own)),
        ("scaler", "scaler.scale" in saved),
        ("guard", "guard.state" in saved),
    ):
        if not present:
            del contents[part]
    # Written with other data, or before corpora had fingerprints.
    if "train.corpus" not in saved:
        contents["train"].pop("corpus", None)
    load(contents, reader, path, world)
    set_model_state_dict(state.module, fresh | contents["model"])
    restore_optimizer(state, contents[OPTIMIZER])
    world.all_or_none(lambda: restore_values(state, contents, rank, path))
    log_changed_samples(state, contents["train"]["samples"], reader, world)


def restore_values(state: State, contents: dict[str, Any], rank: int, path: Place | str) -> None:
    """Restore what is no tensor. Raises CheckpointBroken where it is something else than was saved."""
    train = contents["train"]
    if any(type(value) is not int or value < 0 for value in train.values()):
        raise CheckpointBroken(f"{path}: `train` holds something else than whole numbers")
    corpus = state.data.fingerprint
    if corpus is not None and train.get("corpus", _number_of(corpus)) not in map(
        _number_of, [corpus, *state.data.former_fingerprints]
    ):
        raise CheckpointMismatch(
            f"{path} was written with other data than `training.data` names now; name those, or begin anew with "
            "the checkpoint's weights: `training.checkpoint.initialFrom` and another `training.checkpoint.folder`"
        )
    try:
        if state.precision.scaler is not None and contents.get("scaler"):
            state.precision.scaler.load_state_dict(contents["scaler"])
        if state.guard is not None and contents.get("guard"):
            state.guard.load_state_dict(contents["guard"])
        if "random" in contents:
            restore_saved_random_state(contents["random"][str(rank)])
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise CheckpointBroken(
            f"{path}: the state of the loss scaler, of skipped steps, or of chance, is none: {error}"
        ) from error
    state.step = train["step"]
    # Other data (a job that continues another's model): its order begins at the beginning.
    same_data = train["samples"] == state.sampler.size
    state.cursor = Cursor(train["epoch"], train["position"]) if same_data else Cursor()


def _number_of(fingerprint: str) -> int:
    """Return the beginning of a corpus's fingerprint as a number that a signed 64-bit one holds."""
    return int(fingerprint[:15], 16)
