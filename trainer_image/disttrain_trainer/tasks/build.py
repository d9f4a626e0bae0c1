"""The task that the manifest names."""

from disttrain_api.training import Training
from disttrain_trainer.tasks.base import RunnableTask
from disttrain_trainer.tasks.own import OwnedTask
from disttrain_trainer.tasks.supervised import Supervised


def build_task(training: Training) -> RunnableTask:
    """The user's task, else the built-in one. Raises InvalidConfiguration or EntrypointNotImportable."""
    if training.task is None:
        return Supervised(training)
    initial_from = None if training.checkpoint is None else training.checkpoint.initial_from
    return OwnedTask(training.task, training.optimizer, initial_from)
