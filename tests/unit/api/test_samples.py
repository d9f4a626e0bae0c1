"""`training.evaluation.samples` is checked before anything starts."""

from typing import Any

import pytest

from disttrain_api.validate import problems
from tests.builders import a_manifest

GPT = {"model": {"name": "gpt", "config": {}}, "data": {"name": "text"}}
CODE = {"entrypoint": "a:b"}
SAMPLES = {"prompts": ["Once"], "tokenizer": "/tokenizer"}
BYTES = {"prompts": ["Once", "upon\na time"]}


def found(samples: dict[str, Any], **training: Any) -> list[str]:
    """All that is wrong with a training that evaluates so."""
    manifest = a_manifest(training=GPT | {"evaluation": {"samples": samples}} | training)
    return [str(problem) for problem in problems(manifest)]


@pytest.mark.parametrize("samples", [SAMPLES, BYTES, BYTES | {"maxNewTokens": 1024, "temperature": 0.7, "topK": 50}])
def test_prompts_for_a_language_model_are_accepted(samples: dict[str, Any]) -> None:
    assert found(samples) == []


@pytest.mark.parametrize(
    ("samples", "training", "why"),
    [
        ({}, {}, "samples.prompts: must be given"),
        ({"prompts": []}, {}, "samples.prompts"),
        ({"prompts": ["a"] * 17}, {}, "samples.prompts"),
        ({"prompts": [""]}, {}, "samples.prompts"),
        ({"prompts": ["a" * 8193]}, {}, "samples.prompts"),
        (BYTES | {"maxNewTokens": 1025}, {}, "samples.maxNewTokens"),
        (BYTES | {"temperature": 0}, {}, "samples.temperature"),
        (BYTES | {"topK": 5}, {}, "samples.topK: has no effect without `temperature`"),
        (BYTES | {"maxTokens": 5}, {}, "samples.maxTokens"),
        (SAMPLES, {"task": CODE, "model": None, "data": None}, "`task`"),
        (SAMPLES, {"loss": {"name": "MeanSquaredError"}}, "`loss.name` CrossEntropy"),
        (SAMPLES, {"model": {"name": "mlp"}, "data": {"name": "digits"}}, "`model.name` mlp"),
        (BYTES, {"data": {"name": "corpus", "config": {"path": "/corpus"}}}, "samples.tokenizer: must be given"),
    ],
)
def test_what_has_no_effect_is_refused(samples: dict[str, Any], training: dict[str, Any], why: str) -> None:
    (problem,) = found(samples, **training)
    assert problem.startswith("spec.training.evaluation.samples")
    assert why in problem
