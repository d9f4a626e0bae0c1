"""Which checkpoint to start from: the latest whose every byte is as it was written."""

from disttrain_trainer.errors import CheckpointBroken
from disttrain_trainer.mesh import World
from disttrain_trainer.object_steps import ObjectSteps
from disttrain_trainer.report import say
from disttrain_trainer.step_manifest import Place, StepManifest, flaws, read_manifest
from disttrain_trainer.storage import StepFolders


def latest_sound(folders: StepFolders | ObjectSteps, world: World) -> int | None:
    """Step of the latest sound checkpoint, None where there is no checkpoint. Called by all ranks together.

    Each file is read by one rank, so that a large checkpoint is verified in parallel. Damaged checkpoints after the
    sound one are set aside, with a line of the log each. Raises CheckpointBroken where all are damaged, and touches
    none of them then: to begin again at step 0 is a decision for a person.
    """
    damaged: list[tuple[int, str]] = []
    for step in reversed(world.from_first(folders.complete)):
        flaw = flaw_of(folders.path(step), world)
        if flaw is None:
            for later, why in damaged:
                aside = world.from_first(lambda later=later: folders.set_aside(later))  # type: ignore[misc]
                say(world, f"the checkpoint of step {later} is damaged: {why}; it is now {aside.name}")
            return step
        damaged.append((step, flaw))
    if damaged:
        told = "; ".join(f"step {step}: {flaw}" for step, flaw in damaged)
        raise CheckpointBroken(
            f"no checkpoint in {folders.folder} is as it was written ({told}); bring one back from a backup, or remove "
            "them to begin at step 0"
        )
    return None


def flaw_of(path: Place, world: World) -> str | None:
    """The first thing that is wrong with a checkpoint. Called by all ranks together."""
    manifest = world.from_first(lambda: read_manifest(path))
    if isinstance(manifest, StepManifest):
        share = sorted(manifest.files)[world.rank :: world.size]
        return next((flaw for found in world.gather(flaws(path, manifest, share)) for flaw in found), None)
    if manifest is None:
        say(world, f"{path} has no manifest (an earlier version wrote it): it is loaded without a check")
    return manifest
