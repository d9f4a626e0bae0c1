"""`training.evaluation.samples`: texts that a language model writes after prompts at each evaluation."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel
from disttrain_api.choices import Path, read_or_problems, token_problems
from disttrain_api.training import Training
from disttrain_api.transformers_config import Problem

FIELD = "training.evaluation.samples"
Prompt = Annotated[str, Field(min_length=1, max_length=8192)]


class SamplesConfig(ApiModel):
    """Prompts that the model continues at each evaluation; the texts are in the log and in `samples.jsonl`."""

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=16)]
    """Texts. Each begins with the special tokens that the tokenizer puts before a text, if it does not spell them."""
    max_new_tokens: Annotated[int, Field(ge=1, le=1024)] = 64
    """The most tokens after a prompt. A text also ends at the end-of-sequence token of the tokenizer or the model."""
    tokenizer: Path | None = None
    """A folder with `tokenizer.json`. Absent, with `data.name: text` alone: bytes are the tokens."""
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    """Tokens are drawn from the probabilities at this temperature, by `seed`, step, prompt and position. Absent: the
    most probable one is taken (greedy)."""
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """With `temperature`: drawn from the so many most probable tokens. Absent: from all."""


def samples_config(training: Training) -> SamplesConfig | None:
    """Return what is written at evaluations, None where nothing is. Raises pydantic.ValidationError."""
    given = training.evaluation.samples
    return None if given is None else SamplesConfig.model_validate(given, by_alias=True, by_name=False)


def samples_problems(training: Training) -> Iterator[Problem]:
    """Yield all that is wrong with `evaluation.samples`, alone and beside other fields."""
    config = yield from read_or_problems(FIELD, SamplesConfig, lambda: samples_config(training))
    if config is None:
        return
    yield from token_problems(FIELD, config.tokenizer, training)
    if config.top_k is not None and config.temperature is None:
        yield f"{FIELD}.topK", "has no effect without `temperature`: the most probable token is taken"
