"""`disttrain export CHECKPOINT OUT.safetensors`: a trained model as one file that everybody can read."""

from pathlib import Path

from disttrain.errors import USAGE, CommandError
from disttrain.output import show, tell
from disttrain_trainer.errors import TrainerError
from disttrain_trainer.object_path import ObjectPath
from disttrain_trainer.weights import SUFFIX, export_weights


def export(checkpoint: Path | ObjectPath, target: Path) -> int:
    """Write the file and say so. Raises CommandError."""
    if target.suffix != SUFFIX:
        raise CommandError(f"{target} must end with {SUFFIX}", USAGE)
    if checkpoint.suffix == SUFFIX:
        raise CommandError(f"{checkpoint} is a {SUFFIX} file already; name a checkpoint", USAGE)
    try:
        left_out = export_weights(checkpoint, target)
    except (TrainerError, OSError) as error:
        raise CommandError(str(error)) from error
    if left_out:
        tell(f"left out, since they are no tensors: {', '.join(left_out)}")
    show(f"{target}: {target.stat().st_size} bytes")
    return 0
