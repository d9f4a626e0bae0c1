"""From `training.logging` to the sinks of rank 0."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from disttrain_api.jobconfig import JobConfig
from disttrain_api.training import SinkName
from disttrain_trainer.metrics.sinks.sink import Background, Sink, Sinks
from disttrain_trainer.metrics.tensorboard import open_events
from disttrain_trainer.runtime.errors import InvalidConfiguration

_FIELD = "`training.logging.sinks`"
# Module, and the smallest package that has it.
_PACKAGES = {SinkName.MLFLOW: ("mlflow", "mlflow-skinny"), SinkName.WANDB: ("wandb", "wandb")}


def open_sinks(job: JobConfig, folder: Path | None, environment: Mapping[str, str] = os.environ) -> Sinks:
    """Event files and the services that the job names; `folder`: for what is kept in files.

    Raises InvalidConfiguration where a package, an address or a key is missing, and as `open_events`.
    """
    settings = job.training.logging
    for name in settings.sinks:
        _check(name, environment)
    services = [_open(name, job, folder, environment) for name in dict.fromkeys(settings.sinks)]
    return Sinks([open_events(settings.tensor_board, folder), *services])


def _check(name: SinkName, environment: Mapping[str, str]) -> None:
    module, package = _PACKAGES[name]
    if find_spec(module) is None:
        raise InvalidConfiguration(
            f"{_FIELD}: {name} needs the package `{module}`, which is not installed in this image; install {package}, "
            "or remove the entry"
        )
    if name is SinkName.MLFLOW and not environment.get("MLFLOW_TRACKING_URI"):
        raise InvalidConfiguration(f"{_FIELD}: MLflow needs the address of its server in MLFLOW_TRACKING_URI")
    if name is SinkName.WANDB:
        from disttrain_trainer.metrics.sinks.wandb import has_key

        if not has_key(environment):
            raise InvalidConfiguration(f"{_FIELD}: WandB needs a key in WANDB_API_KEY, or WANDB_MODE=offline")


def _open(name: SinkName, job: JobConfig, folder: Path | None, environment: Mapping[str, str]) -> Sink:
    if name is SinkName.WANDB:
        from disttrain_trainer.metrics.sinks.wandb import WandBSink

        return Background(name, lambda: WandBSink(job, folder))
    from disttrain_trainer.metrics.sinks.mlflow import MLflowSink

    experiment = environment.get("MLFLOW_EXPERIMENT_NAME") or "disttrain"
    return Background(name, lambda: MLflowSink(job, experiment))
