"""`training.evaluation.choices`: questions whose choices a language model tells apart by their likelihood."""

from collections.abc import Callable, Generator, Iterator
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from disttrain_api import sentences
from disttrain_api.base import ApiModel
from disttrain_api.training import DataName, LossName, ModelName, Training
from disttrain_api.transformers_config import Problem

FIELD = "training.evaluation.choices"
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Config = TypeVar("Config", bound=ApiModel)
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]


class ChoicesConfig(ApiModel):
    """Tasks of questions with several choices, of which the model finds one the likeliest: figures `<task>/acc`,
    `<task>/acc_norm` and `<task>/acc_bytes` as lm-evaluation-harness computes them, and `<task>/bpb`, the bits per byte
    of the answers."""

    tasks: Annotated[dict[TaskName, Path], Field(min_length=1, max_length=8)]
    """The file of each task, by its name: JSON Lines of `{"context": "…", "choices": ["…", …], "answer": 0}`; the same
    in every pod."""
    tokenizer: Path | None = None
    """A folder with `tokenizer.json`. Absent, with `data.name: text` alone: bytes are the tokens."""
    delimiter: Annotated[str, Field(max_length=16)] = " "
    """Stands between a context and each choice, and is no part of the choice's length."""


def choices_config(training: Training) -> ChoicesConfig | None:
    """Return the tasks of the evaluation, None where there are none. Raises pydantic.ValidationError."""
    given = training.evaluation.choices
    return None if given is None else ChoicesConfig.model_validate(given, by_alias=True, by_name=False)


def choices_problems(training: Training) -> Iterator[Problem]:
    """Yield all that is wrong with `evaluation.choices`, alone and beside other fields."""
    config = yield from read_or_problems(FIELD, ChoicesConfig, lambda: choices_config(training))
    if config is not None:
        yield from token_problems(FIELD, config.tokenizer, training)


def read_or_problems(
    field: str, kind: type[Config], read: Callable[[], Config | None]
) -> Generator[Problem, None, Config | None]:
    """Return what `read` does: the arguments of an evaluation, of this kind; None where there are none.

    Yields what is wrong with them, and then returns None.
    """
    try:
        return read()
    except ValidationError as error:
        for found in sentences.violations(error, kind):
            path = ".".join((field, *(str(step) for step in found.location)))
            yield path, f"{found.message}; {found.hint}" if found.hint else found.message
    return None


def token_problems(field: str, tokenizer: str | None, training: Training) -> Iterator[Problem]:
    """Yield why an evaluation that needs the logits of tokens does not go with the training."""
    if training.task is not None:
        yield field, "conflicts with `task`, whose model need not return the logits of tokens: remove one of the two"
    elif training.loss.name is not LossName.CROSS_ENTROPY:
        yield field, f"needs `loss.name` CrossEntropy, whose model returns logits; found {training.loss.name}"
    elif training.model.name in (ModelName.MLP, ModelName.RESNET):
        yield field, f"needs a model of tokens, and `model.name` {training.model.name} is none"
    elif training.data.name is DataName.DIGITS:
        yield field, "needs data of tokens, and `data.name` digits has images"
    elif tokenizer is None and training.data.name is not DataName.TEXT:
        yield f"{field}.tokenizer", "must be given: bytes are the tokens of `data.name` text alone"
