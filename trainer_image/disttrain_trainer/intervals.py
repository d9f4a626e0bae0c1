"""When something is due that needs the parameters of exactly one step."""

from disttrain_api.training import Checkpoint, Training


def next_due(step: int, training: Training, checkpoints: bool) -> int:
    """The next step that an evaluation, a checkpoint (where some are written) or the end follows."""
    intervals = [training.evaluation.interval]
    if checkpoints:
        intervals.append((training.checkpoint or Checkpoint()).interval)
    due = [(step // interval + 1) * interval for interval in intervals if interval]
    return min([*due, training.steps])
