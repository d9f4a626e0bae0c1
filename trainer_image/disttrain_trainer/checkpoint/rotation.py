"""Which checkpoints stay: the latest, and the best by a figure of the held-out data."""

from collections.abc import Mapping

from disttrain_api.training import BestMetric, Checkpoint
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.base import RunnableTask


def figure_name(settings: Checkpoint) -> str:
    """Key of the figure, as evaluation names it."""
    return (settings.best_metric or BestMetric.LOSS).value.lower()


def kept(figures: Mapping[int, float | None], settings: Checkpoint) -> set[int]:
    """The steps that stay, of all that have a complete checkpoint; None: it was not judged.

    The least loss and the highest accuracy are best; of two alike, the earlier.
    """
    sign = -1 if settings.best_metric is BestMetric.ACCURACY else 1
    judged = sorted((sign * figure, step) for step, figure in figures.items() if figure is not None)
    return {*sorted(figures)[-settings.keep_latest :], *(step for _, step in judged[: settings.keep_best or 0])}


def require_figure(settings: Checkpoint, task: RunnableTask, data: Datasets) -> None:
    """Raises InvalidConfiguration where no evaluation of this data can say which checkpoint is best."""
    if settings.keep_best is None:
        return
    if data.held_out is None or len(data.held_out) == 0:
        raise InvalidConfiguration(
            "`training.checkpoint.keepBest` goes by held-out samples, and the data has none: hold some out or remove it"
        )
    if task.has_figure(figure_name(settings), data) is False:
        raise InvalidConfiguration(
            "`training.checkpoint.bestMetric` Accuracy is a figure of classes, and the targets are not: use Loss"
        )
