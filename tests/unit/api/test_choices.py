"""`training.evaluation.choices` is checked before anything starts."""

from typing import Any

import pytest

from disttrain_api.validate import problems
from tests.builders import a_manifest

GPT = {"model": {"name": "gpt", "config": {}}, "data": {"name": "text"}}
CODE = {"entrypoint": "a:b"}
CHOICES = {"tasks": {"hellaswag": "/tasks/hellaswag.jsonl"}, "tokenizer": "/tokenizer"}
WITHOUT = {"tasks": CHOICES["tasks"]}


def found(choices: dict[str, Any], **training: Any) -> list[str]:
    """All that is wrong with a training that evaluates so."""
    manifest = a_manifest(training=GPT | {"evaluation": {"choices": choices}} | training)
    return [str(problem) for problem in problems(manifest)]


@pytest.mark.parametrize("choices", [CHOICES, WITHOUT, WITHOUT | {"delimiter": ""}])
def test_tasks_of_a_language_model_are_accepted(choices: dict[str, Any]) -> None:
    assert found(choices) == []


@pytest.mark.parametrize(
    ("choices", "training", "why"),
    [
        ({}, {}, "choices.tasks: must be given"),
        (CHOICES | {"tasks": {}}, {}, "choices.tasks"),
        (CHOICES | {"tasks": {f"t{number}": "/t" for number in range(9)}}, {}, "choices.tasks"),
        (CHOICES | {"tasks": {"a/b": "/t"}}, {}, "choices.tasks"),
        (CHOICES | {"tasks": {"a": ["/t"]}}, {}, "`tasks.a`"),
        (CHOICES | {"tokeniser": "/tokenizer"}, {}, "choices.tokeniser"),
        (CHOICES, {"task": CODE, "model": None, "data": None}, "`task`"),
        (CHOICES, {"loss": {"name": "MeanSquaredError"}}, "`loss.name` CrossEntropy"),
        (CHOICES, {"model": {"name": "mlp"}, "data": {"name": "digits"}}, "`model.name` mlp"),
        (CHOICES, {"model": CODE | {"name": None}, "data": {"name": "digits"}}, "`data.name` digits"),
        (WITHOUT, {"data": {"name": "corpus", "config": {"path": "/corpus"}}}, "choices.tokenizer: must be given"),
    ],
)
def test_what_has_no_effect_is_refused(choices: dict[str, Any], training: dict[str, Any], why: str) -> None:
    (problem,) = found(choices, **training)
    assert problem.startswith("spec.training.evaluation.choices")
    assert why in problem
