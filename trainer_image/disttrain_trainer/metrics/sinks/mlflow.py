"""An MLflow run for all attempts of a job, on the server of MLFLOW_TRACKING_URI."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.metrics.sinks.sink import Samples, Values

JOB_TAG = "disttrain.job-uid"
# MLflow's limits.
_LONGEST_PARAMETER = 6000
_MOST_PARAMETERS = 100


class MLflowSink:
    """Figures under the keys of metrics.jsonl, without the signs that MLflow does not take: "throughput_tps". Texts are
    artifacts: JSON Lines for each step, as in samples.jsonl."""

    def __init__(self, job: JobConfig, experiment: str) -> None:
        """Find the job's run, of an earlier attempt, or begin it. Raises what MLflow raises where it is away."""
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        at = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        earlier = self._client.search_runs([at], filter_string=f"tags.`{JOB_TAG}` = '{job.uid}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(at, run_name=job.name, tags={JOB_TAG: job.uid}).info.run_id
        parameters = [
            Param(key, value[:_LONGEST_PARAMETER]) for key, value in flat(job.training.model_dump(mode="json"))
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MOST_PARAMETERS])

    def write(self, values: Values) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(key_of(name), value, now, values["step"])
            for name, value in values.items()
            if name != "step" and value is not None
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def write_samples(self, step: int, samples: Samples) -> None:
        lines = [json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n" for prompt, text in samples]
        self._client.log_text(self._run, "".join(lines), f"samples/step-{step}.jsonl")

    def close(self) -> None:
        """This attempt is over; another one goes on with the run."""
        self._client.set_terminated(self._run)


def key_of(name: str) -> str:
    """ "throughput(tps)" -> "throughput_tps": MLflow takes letters, digits and _-. :/ alone."""
    return re.sub(r"[^\w\-. :/]+", "_", name, flags=re.ASCII).strip("_")


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """{"model": {"name": "gpt"}} -> [("model.name", "gpt")]; what is absent is left out."""
    found: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}.")
        elif value is not None:
            found.append((f"{prefix}{name}", str(value)))
    return found
