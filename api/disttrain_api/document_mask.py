"""Layouts in which attention cannot stay within the documents of a sample.

CEL cannot see it: the config of data has no schema.
"""

from collections.abc import Iterator

from disttrain_api.builtin import config_problems, data_config
from disttrain_api.chat import ChatConfig
from disttrain_api.corpus import CorpusConfig
from disttrain_api.parallelism import Parallelism
from disttrain_api.pipeline import is_flushless, schedule_of
from disttrain_api.training import Data, Training
from disttrain_api.transformers_config import Problem


def mask_setting(data: Data) -> str | None:
    """Return the field of the data's config, if one does, by which samples have several documents that attention keeps
    apart. The config is valid."""
    config = None if data.name is None else data_config(data)
    if isinstance(config, CorpusConfig) and config.document_mask:
        return "documentMask"
    return "packing" if isinstance(config, ChatConfig) and config.packing else None


def document_mask_problems(training: Training, parallelism: Parallelism) -> Iterator[Problem]:
    """Yield the settings of the layout that conflict with such a field."""
    if config_problems(training) or (setting := mask_setting(training.data)) is None:
        return
    place = f"training.data.config.{setting}"
    if (parallelism.devices_per_process or 1) > 1:
        yield place, "conflicts with `devicesPerProcess`: use a process per device"
    if is_flushless(parallelism):
        schedule = schedule_of(parallelism)
        yield place, f"conflicts with the schedule '{schedule}': use one that is flushed in every step"
