"""The checkpoints of a folder, as the attempt that owns it changes them. On rank 0 alone.

What holds, whatever dies or stalls at whatever point:
- Once `take_over` has returned, nothing that an older owner was writing becomes complete. It may stall between its look
  at the fence and the rename that commits; but its successor, who claims first and looks for unfinished checkpoints
  then, takes away each one that was begun before, and what is begun later is committed after another look at the fence.
- What is complete stays so until something of a later step, or of the same one, is: a checkpoint is committed by one
  rename beside one of the same step, which goes afterwards.
- An owner that has been overtaken changes nothing any more, but for what it is about to do in that moment: it may still
  delete what it has found to be superseded.
"""

from collections.abc import Mapping

from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint.fence import Fence
from disttrain_trainer.checkpoint.object_steps import ObjectSteps
from disttrain_trainer.checkpoint.retention import figure_name, kept
from disttrain_trainer.checkpoint.step_manifest import MANIFEST_FILE, Place, StepManifest, read_manifest
from disttrain_trainer.checkpoint.storage import StepFolders, full_is_an_error
from disttrain_trainer.runtime.files import write_atomically


class OwnedSteps:
    """Takes a folder over, commits to it, and deletes what is not to be kept."""

    def __init__(self, steps: StepFolders | ObjectSteps, fence: Fence, settings: Checkpoint) -> None:
        self._steps, self._fence, self._settings = steps, fence, settings
        self._number = 0

    def take_over(self) -> int:
        """Become the owner and clear away what others have left unfinished. Returns the number of the claim.

        What the owner before had finished and not yet committed is committed now. Raises what Fence.take does.
        """
        with full_is_an_error(self._steps.folder):
            taken = self._fence.take()
        self._number = taken.number
        last = [one for one in self._steps.look().unfinished if one.number == taken.before]
        finished = [one for one in last if self._steps.is_written(one)]
        # A third owner may have taken over before all of it was there.
        self._fence.check()
        for one in finished:
            self._steps.adopt(one)
        self._clear_away()
        self._steps.finish_removals()
        return taken.number

    def commit(self, partial: Place, step: int) -> Place:
        """Make complete what has been written, then delete what is neither to be kept nor this one.

        Raises Fenced or CheckpointsTaken, and leaves what was written to the new owner; StorageFull.
        """
        self._fence.check()
        try:
            with full_is_an_error(self._steps.folder):
                path = self._steps.commit(partial, step, self._number)
        except BaseException:
            self.give_up(partial)
            raise
        self._steps.forget_broken(step)
        self._rotate(path)
        return path

    def give_up(self, partial: Place) -> int:
        """Delete what was written of a checkpoint that failed, and return its bytes. Raises what `commit` does."""
        # A successor takes away what an older attempt is writing; then that is the cause.
        self._fence.check()
        size = self._steps.size(partial.name)
        self._steps.remove(partial.name)
        return size

    def figures(self, step: int) -> dict[str, float] | None:
        """Return what an evaluation has found of the complete checkpoint of a step; None where there is none."""
        manifest = self._newest(step)[1]
        return manifest.figures if manifest is not None else None

    def add_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Add to the complete checkpoint of a step, if there is one, what an evaluation has found; then rotate."""
        place, manifest = self._newest(step)
        if place is not None and manifest is not None:
            self._fence.check()
            write_atomically(place / MANIFEST_FILE, manifest.model_copy(update={"figures": dict(figures)}).text())
            self._rotate()

    def _newest(self, step: int) -> tuple[Place | None, StepManifest | None]:
        found = [one for one in self._steps.look().complete if one.step == step]
        if not found:
            return None, None
        place = self._steps.folder / found[-1].name
        manifest = read_manifest(place)
        return place, manifest if isinstance(manifest, StepManifest) else None

    def _rotate(self, committed: Place | None = None) -> None:
        """Delete what is neither among the latest nor the best ones to keep, nor was committed just now."""
        complete = self._steps.look().complete
        last = {one.step: one for one in complete}
        keep = kept({step: self._figure(one.name) for step, one in last.items()}, self._settings)
        for one in complete:
            # Only what was listed here is compared: a successor may have committed more since.
            superseded = one.step not in keep or one != last[one.step]
            if superseded and (committed is None or one.name != committed.name):
                self._steps.remove(one.name)
        self._clear_away()

    def _clear_away(self) -> None:
        """Delete what owners before this one have not finished."""
        for one in self._steps.look().unfinished:
            if one.number < self._number:
                self._steps.remove(one.name)

    def _figure(self, name: str) -> float | None:
        """Return the figure by which a complete checkpoint may be among the best."""
        manifest = read_manifest(self._steps.folder / name) if self._settings.keep_best else None
        return manifest.figures.get(figure_name(self._settings)) if isinstance(manifest, StepManifest) else None
