"""Checkpoints of a session: in the folders, with the fence, the checks and the rotation of the trainer's own.

Every method is called by all ranks together.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from disttrain_api.report import CheckpointReport
from disttrain_api.training import Checkpoint
from disttrain_session.objects import Objects
from disttrain_trainer.checkpoint import plans as checkpoint_plans
from disttrain_trainer.checkpoint.compatibility import extra_state_in, require_model_fits, stored_shapes
from disttrain_trainer.checkpoint.dedup import without_others
from disttrain_trainer.checkpoint.fence import Fence
from disttrain_trainer.checkpoint.kept_extra_state import of_this_rank, take_extra_state
from disttrain_trainer.checkpoint.owned_steps import OwnedSteps
from disttrain_trainer.checkpoint.step_manifest import Place, Step, StepManifest, read_manifest
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.checkpoint.step_writer import StepWriter
from disttrain_trainer.checkpoint.storage import report_of, require_shared, steps_in
from disttrain_trainer.checkpoint.verify import latest_sound
from disttrain_trainer.parallel.data_parallel import share_buffers
from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointMismatch, StorageFull, no_room, one_line
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.plain import from_bytes, to_bytes
from disttrain_trainer.runtime.randomness import restore_saved_random_state, saved_random_state

_ADVICE = "use the script that wrote it, or another folder"


class Checkpoints:
    """The checkpoints in a folder, which this attempt owns from now on.

    Raises StorageNotShared, InvalidConfiguration (cannot write), Fenced or CheckpointsTaken.
    """

    def __init__(self, folder: Place, uid: str, attempt: int, settings: Checkpoint, world: World) -> None:
        self._world, self._attempt, self._settings = world, attempt, settings
        self._folders = steps_in(folder, uid)
        self._owned = OwnedSteps(self._folders, Fence(folder, uid, attempt), settings)
        require_shared(folder, world)
        self._number = world.from_first(self._owned.take_over, int)
        self.latest: CheckpointReport | None = None
        """The latest complete checkpoint."""

    def due(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        return step % self._settings.interval == 0

    def restore(self, objects: Objects) -> int | None:
        """Load the latest sound checkpoint and return its step; None where there is none.

        Raises CheckpointBroken, or CheckpointMismatch naming what does not fit.
        """
        found = latest_sound(self._folders, self._world)
        if found is None:
            return None
        path = self._folders.folder / found.name
        self._require_world(path)
        reader, own = self._own_state(path, found, objects)
        shared = self._shared_state(path, reader, objects)
        self._world.all_or_none(lambda: _apply(objects, shared, own, path))
        self.latest = report_of(found.step, path)
        return found.step

    def save(self, step: int, objects: Objects) -> None:
        """Write and commit the checkpoint of a step, unless it is the latest already.

        Raises StorageFull or Fenced on every rank; ValueError for state that a checkpoint cannot hold.
        """
        if self.latest is not None and self.latest.step == step:
            return
        for model in objects.models.values():
            # Each rank writes some of what is alike, so buffers must be alike, too.
            share_buffers(model, self._world)
        own = {
            "step": step,
            "names": objects.names,
            "random": saved_random_state(),
            **objects.own_state(),
        }
        shared = objects.shared_state()
        extra = {name: take_extra_state(shared[name]) for name in objects.models}
        contents = without_others(shared, self._world)
        for name, model in objects.models.items():
            contents[name] = contents.get(name, {}) | of_this_rank(extra[name], model, None, self._world)
        contents["ranks"] = {str(self._world.rank): to_bytes(own)}
        manifest = StepManifest(
            step=step, attempt=self._attempt, world_size=self._world.size, mesh=asdict(self._world.mesh)
        )
        partial = self._folders.partial(step, self._number)
        try:
            checkpoint_plans.save(contents, StepWriter(partial, manifest), None)
        except CheckpointException as failure:
            self._world.from_first(lambda failure=failure: self._give_up(partial, failure))  # type: ignore[misc]
            raise
        commit = lambda: report_of(step, self._owned.commit(partial, step))  # noqa: E731
        self.latest = self._world.from_first(commit, CheckpointReport)

    def _give_up(self, partial: Place, error: CheckpointException) -> None:
        size = self._owned.give_up(partial)
        if any(no_room(cause) for cause, _ in error.failures.values()):
            raise StorageFull(
                f"no room for {partial.name.split('.')[0]} in {partial.parent} after {size} bytes; earlier checkpoints "
                f"are untouched; make room there, or lower keep_latest from {self._settings.keep_latest}"
            )

    def _require_world(self, path: Place) -> None:
        manifest = self._world.from_first(lambda: read_manifest(path), StepManifest | str | None)
        if isinstance(manifest, StepManifest) and manifest.world_size != self._world.size:
            raise CheckpointMismatch(
                f"{path} was written by {manifest.world_size} ranks, here are {self._world.size}: each rank has state "
                "of its own in it, so go on with as many ranks, or begin anew in another folder"
            )

    def _own_state(self, path: Place, found: Step, objects: Objects) -> tuple[StepReader, dict[str, Any]]:
        reader, state = StepReader(path), {}
        name = f"ranks.{self._world.rank}"

        def look() -> torch.Tensor:
            entry = reader.read_metadata().state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata) or entry.properties.dtype != torch.uint8:
                raise CheckpointMismatch(f"{path} is no checkpoint of a session: {_ADVICE}")
            return torch.empty(entry.size, dtype=torch.uint8)

        room: list[torch.Tensor] = []
        self._world.all_or_none(lambda: room.append(look()))
        load({"ranks": {str(self._world.rank): room[0]}}, reader, path, self._world)
        self._world.all_or_none(lambda: state.update(_checked_state(room[0], path, found.step, objects)))
        return reader, state

    def _shared_state(self, path: Place, reader: StepReader, objects: Objects) -> dict[str, Any]:
        shared: dict[str, Any] = {}

        def prepare() -> None:
            metadata = reader.read_metadata()
            try:
                shared.update(objects.room(metadata))
            except ValueError as error:
                raise CheckpointMismatch(f"{path}: {error}; {_ADVICE}") from error
            for name in objects.models:
                there = stored_shapes(metadata, f"{name}.")
                extra, names = extra_state_in(shared[name]), get_model_state_dict(objects.models[name]).keys()
                weights = {key: value for key, value in shared[name].items() if key not in extra}
                require_model_fits(there, weights, names, path, _ADVICE)

        self._world.all_or_none(prepare)
        if shared:
            load(shared, reader, path, self._world)
        return shared


def _checked_state(data: torch.Tensor, path: Place, step: int, objects: Objects) -> dict[str, Any]:
    try:
        state = from_bytes(data)
    except ValueError as error:
        raise CheckpointBroken(f"{path}: the state of a rank cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("step") != step:
        raise CheckpointBroken(f"{path} holds no state of step {step}: rename or remove it")
    if state["names"] != objects.names:
        missing = sorted(set(state["names"]) - set(objects.names)) or ["nothing"]
        new = sorted(set(objects.names) - set(state["names"])) or ["nothing"]
        raise CheckpointMismatch(
            f"{path} holds other objects: {', '.join(missing)} is not registered here, {', '.join(new)} is not in it; "
            f"{_ADVICE}"
        )
    return state


def _apply(objects: Objects, shared: dict[str, Any], own: dict[str, Any], path: Place) -> None:
    try:
        objects.restore(shared, own)
        restore_saved_random_state(own["random"])
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise CheckpointMismatch(
            f"{path} does not fit: {type(error).__name__}: {one_line(error)}; {_ADVICE}"
        ) from error
