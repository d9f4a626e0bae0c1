"""Layouts in which `documentMask` has no effect are refused by name."""

from typing import Any

import pytest

from disttrain_api.validate import problems
from tests.builders import a_manifest

PLACE = "spec.training.data.config.documentMask"
PIPELINE = {"pipelineParallelDegree": 2}


def found(parallelism: dict[str, Any], **config: Any) -> list[str]:
    """All that is wrong with a gpt on a corpus."""
    training = {
        "model": {"name": "gpt", "config": {"tieWeights": False}},
        "data": {"name": "corpus", "config": {"path": "/corpus", **config}},
    }
    return [str(problem) for problem in problems(a_manifest(training=training, parallelism=parallelism))]


@pytest.mark.parametrize(
    ("parallelism", "conflict"),
    [
        ({"contextParallelDegree": 2, "contextParallelMethod": "Ring"}, "`contextParallelMethod` Ring"),
        ({"devicesPerProcess": 2}, "`devicesPerProcess`"),
        ({**PIPELINE, "pipeline": {"schedule": "PipeDream"}}, "the schedule 'PipeDream'"),
        ({**PIPELINE, "pipeline": {"schedule": "PipeDream2BW"}}, "the schedule 'PipeDream2BW'"),
        ({"contextParallelDegree": 2}, None),
        (PIPELINE, None),
    ],
)
def test_a_layout_that_cannot_keep_documents_apart_is_refused(
    parallelism: dict[str, Any], conflict: str | None
) -> None:
    sentences = found(parallelism, documentMask=True)
    assert len(sentences) == (conflict is not None)
    assert all(sentence.startswith(f"{PLACE}: conflicts with {conflict}") for sentence in sentences)
    assert found(parallelism) == []
