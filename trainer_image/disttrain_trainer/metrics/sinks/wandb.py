"""A run of Weights & Biases for all attempts of a job. Its own variables say where: WANDB_PROJECT, WANDB_MODE, …"""

import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.metrics.sinks.sink import Samples, Values


class WandBSink:
    """Figures under the keys of metrics.jsonl; texts as a table for each step, `samples`."""

    def __init__(self, job: JobConfig, folder: Path | None) -> None:
        """Begin or go on with the run whose id is the job's. Raises wandb.errors.Error where the service is away."""
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "disttrain"),
            id=job.uid,
            resume="allow",
            name=job.name,
            config=job.training.model_dump(mode="json", exclude_none=True),
            dir=folder,
            # What the ranks print has its place already.
            settings=wandb.Settings(console="off", silent=True),
        )
        # After a restart steps come again; wandb's own counter only rises.
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Values) -> None:
        self._run.log({name: value for name, value in values.items() if value is not None})

    def write_samples(self, step: int, samples: Samples) -> None:
        table = wandb.Table(columns=["step", "prompt", "text"], data=[[step, *sample] for sample in samples])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()


def has_key(environment: Mapping[str, str]) -> bool:
    """Whether wandb will find a key, or needs none."""
    netrc = Path(environment.get("NETRC") or Path(environment.get("HOME", "/"), ".netrc"))
    return bool(environment.get("WANDB_API_KEY") or environment.get("WANDB_MODE")) or netrc.exists()
