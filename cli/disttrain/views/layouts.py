"""Output of `disttrain plan --layouts`: a ranking -> text. Pure."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from disttrain.planning.candidates import Candidate, Ranking
from disttrain_api.memory import in_words

HEADINGS = ("ROW", "LAYOUT", "MICRO BATCH", "NEEDS", "STEP", "COMPUTE", "BUBBLE", "SENDING", "HIDDEN")
LEFT_OUT_HEADINGS = ("LEFT OUT", "NEEDS", "WHY")


def rows(ranking: Ranking) -> Iterator[list[str]]:
    """Yield a row for each layout that fits, the fastest first; times in seconds."""
    for number, one in enumerate(ranking.ranked, 1):
        assert one.time is not None
        seconds = (one.time.total, one.time.compute, one.time.bubble, one.time.sending, one.time.hidden)
        micro = str(one.layout.micro_batch_size)
        yield [str(number), _name(one), micro, _needs(one), *(f"{part:.3g}" for part in seconds)]


def left_out_rows(ranking: Ranking) -> Iterator[list[str]]:
    """Yield a row for each layout that is left out."""
    for one in ranking.left_out:
        yield [_name(one), _needs(one), one.reason or ""]


def as_data(ranking: Ranking) -> dict[str, Any]:
    """Return the ranking as plain data, for JSON."""
    return {
        "ranked": [_data(one) for one in ranking.ranked],
        "left_out": [_data(one) for one in ranking.left_out],
        "not_estimated": ranking.unasked,
    }


def _data(one: Candidate) -> dict[str, Any]:
    seconds = None
    if one.time is not None:
        seconds = {**asdict(one.time), "sending": one.time.sending, "step": one.time.total}
        del seconds["messages"], seconds["servers"]
    parallelism = one.layout.parallelism.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {
        "layout": _name(one),
        "parallelism": parallelism,
        "recomputes": one.layout.recompute,
        "microBatchSize": one.layout.micro_batch_size,
        "gradientAccumulationSteps": one.layout.accumulation,
        "needed": one.needed,
        "seconds": seconds,
        "reason": one.reason,
    }


def _name(one: Candidate) -> str:
    return one.layout.describe(one.job.spec.world_size)


def _needs(one: Candidate) -> str:
    return "?" if one.needed is None else in_words(one.needed)
