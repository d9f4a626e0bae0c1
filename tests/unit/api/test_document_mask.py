"""Layouts in which `documentMask` and `packing` have no effect are refused by name."""

from typing import Any

import pytest

from disttrain_api.validate import problems
from tests.builders import a_manifest

# The data, and the field by which they have documents.
DATA = {
    "documentMask": {"name": "corpus", "config": {"path": "/corpus"}},
    "packing": {"name": "chat", "config": {"path": "/chats", "tokenizer": "/tokenizer"}},
}
PIPELINE = {"pipelineParallelDegree": 2}


def found(parallelism: dict[str, Any], setting: str, value: bool) -> list[str]:
    """All that is wrong with a gpt on such data."""
    data: dict[str, Any] = DATA[setting]
    training = {
        "model": {"name": "gpt", "config": {"tieWeights": False, "vocabularySize": 256}},
        "data": data | {"config": data["config"] | {setting: value}},
    }
    return [str(problem) for problem in problems(a_manifest(training=training, parallelism=parallelism))]


@pytest.mark.parametrize("setting", DATA)
@pytest.mark.parametrize(
    ("parallelism", "conflict"),
    [
        ({"devicesPerProcess": 2}, "`devicesPerProcess`"),
        ({**PIPELINE, "pipeline": {"schedule": "PipeDream"}}, "the schedule 'PipeDream'"),
        ({**PIPELINE, "pipeline": {"schedule": "PipeDream2BW"}}, "the schedule 'PipeDream2BW'"),
        ({"contextParallelDegree": 2}, None),
        ({"contextParallelDegree": 2, "contextParallelMethod": "Ring"}, None),
        (PIPELINE, None),
    ],
)
def test_a_layout_that_cannot_keep_documents_apart_is_refused(
    parallelism: dict[str, Any], conflict: str | None, setting: str
) -> None:
    sentences = found(parallelism, setting, value=True)
    assert len(sentences) == (conflict is not None)
    place = f"spec.training.data.config.{setting}"
    assert all(sentence.startswith(f"{place}: conflicts with {conflict}") for sentence in sentences)
    assert found(parallelism, setting, value=False) == []
