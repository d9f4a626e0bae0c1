"""Layouts in which texts that are not prepared cannot be read are refused before anything starts."""

from typing import Any

import pytest

from disttrain_api.validate import problems
from tests.builders import a_manifest

PIPELINE = {"pipelineParallelDegree": 2}
SERVERS = {"dataParallel": {"mode": "ParameterServer"}}


def found(workers: int, parallelism: dict[str, Any], name: str = "lines", **training: Any) -> list[str]:
    """All that is wrong with a gpt on such data."""
    model = {"name": "gpt", "config": {"tieWeights": False, "vocabularySize": 256}}
    training |= {"model": model, "data": {"name": name, "config": {"path": "/texts"}}}
    servers = {"parameterServers": {"replicas": 1}} if parallelism == SERVERS else {}
    job = a_manifest(training=training, parallelism=parallelism, workers={"replicas": workers}, **servers)
    return [str(problem) for problem in problems(job)]


@pytest.mark.parametrize(
    ("workers", "parallelism", "training", "sentence"),
    [
        (6, {}, {}, None),
        (128, {"tensorParallelDegree": 4}, {}, None),
        (7, {}, {}, "spec.training.data.name: lines is shared by a number of replicas that divides 960, found 7: "),
        (14, {"dataParallelShardDegree": 14}, {}, "spec.training.data.name: lines is shared by a number of replicas"),
        (2, PIPELINE, {}, "spec.training.data.name: stages of a pipeline read samples by their numbers"),
        (2, SERVERS, {}, "spec.training.data.name: parameter servers assign samples by their numbers"),
        (2, {}, {"dataWorkers": 1}, "spec.training.dataWorkers: must be left out with `training.data.name: lines`"),
    ],
)
def test_what_cannot_read_them_is_refused(
    workers: int, parallelism: dict[str, Any], training: dict[str, Any], sentence: str | None
) -> None:
    sentences = found(workers, parallelism, **training)
    assert len(sentences) == (sentence is not None), sentences
    assert all(one.startswith(str(sentence)) for one in sentences)
    assert found(workers, parallelism, "corpus", **training) == []
