"""Which checkpoints stay: the latest, and the best by a figure of the held-out data."""

from collections.abc import Mapping

from disttrain_api.training import KNOWN_MODES, BestMode, Checkpoint
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.base import RunnableTask


def figure_name(settings: Checkpoint) -> str:
    """Key of the figure, as evaluation names it."""
    name = settings.best_metric or "Loss"
    return name.lower() if name in KNOWN_MODES else name


def kept(figures: Mapping[int, float | None], settings: Checkpoint) -> set[int]:
    """The steps that stay, of all that have a complete checkpoint; None: it was not judged.

    The least loss and the highest accuracy are best, of other figures what the manifest says; of two alike the first.
    """
    mode = settings.best_mode or KNOWN_MODES[figure_name(settings).capitalize()]
    sign = -1 if mode is BestMode.MAX else 1
    ranked = sorted((sign * figure, step) for step, figure in figures.items() if figure is not None)
    return {*sorted(figures)[-settings.keep_latest :], *(step for _, step in ranked[: settings.keep_best or 0])}


def require_figure(settings: Checkpoint, task: RunnableTask, data: Datasets) -> None:
    """Raises InvalidConfiguration where no evaluation of this data can say which checkpoint is best."""
    if settings.keep_best is None:
        return
    if data.held_out is None or len(data.held_out) == 0:
        raise InvalidConfiguration(
            "`training.checkpoint.keepBest` goes by held-out samples, and the data has none: hold some out or remove it"
        )
    name = figure_name(settings)
    if task.has_figure(name, data) is False:
        found = "a figure of classes, and the targets are not" if name == "accuracy" else "no figure of this job's"
        raise InvalidConfiguration(f"`training.checkpoint.bestMetric` {settings.best_metric} is {found}: use Loss")


def require_judged(settings: Checkpoint, figures: Mapping[str, float]) -> None:
    """Raises InvalidConfiguration where an evaluation has not found the figure that the best checkpoints go by."""
    if settings.keep_best is not None and figures and figure_name(settings) not in figures:
        raise InvalidConfiguration(
            f"`training.checkpoint.bestMetric` {settings.best_metric} is no figure of the evaluation, which has "
            f"{', '.join(f'`{name}`' for name in sorted(figures))}: use one of them"
        )
