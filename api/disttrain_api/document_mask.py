"""Layouts in which attention cannot stay within the documents of a sample.

CEL cannot see it: the config of data has no schema.
"""

from collections.abc import Iterator

from disttrain_api.builtin import config_problems, data_config
from disttrain_api.corpus import CorpusConfig
from disttrain_api.parallelism import ContextParallelMethod, Parallelism
from disttrain_api.pipeline import is_flushless, schedule_of
from disttrain_api.training import DataName, Training
from disttrain_api.transformers_config import Problem

_PLACE = "training.data.config.documentMask"


def document_mask_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    """Yield the settings of the layout that conflict with `documentMask`."""
    if training.data.name is not DataName.CORPUS or config_problems(training):
        return
    config = data_config(training.data)
    if not isinstance(config, CorpusConfig) or not config.document_mask:
        return
    if parallelism.context_parallel_method is ContextParallelMethod.RING:
        yield _PLACE, "conflicts with `contextParallelMethod` Ring, whose ranks see no whole documents: use Ulysses"
    if (parallelism.devices_per_process or 1) > 1:
        yield _PLACE, "conflicts with `devicesPerProcess`: use a process per device"
    if is_flushless(parallelism):
        schedule = schedule_of(parallelism)
        yield _PLACE, f"conflicts with the schedule '{schedule}': use one that is flushed in every step"
