"""Answer of an agent to `/v1/stacks`: where the threads of its ranks are. Text of a pod: hostile."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel
from disttrain_api.flight_recorder import HEADER, Collective, collectives_below, lines_of, shortest
from disttrain_api.report import MAX_RANKS_PER_POD

MAX_STACKS_ANSWER_BYTES = 256 * 1024
"""The largest answer that is read of the main threads of a pod: 256 bytes for each of 1,024 calls."""
MAX_WHOLE_STACKS_BYTES = 4 * 1024 * 1024
"""The largest answer that a person is shown of all threads of a pod."""


class Stacks(ApiModel):
    """Answer of an agent to `/v1/stacks`."""

    model_config = {**ApiModel.model_config, "extra": "ignore"}

    stacks: Annotated[dict[str, str], Field(max_length=MAX_RANKS_PER_POD)]


STOPPED = "it does not answer: a signal has stopped it"
"""In place of the stacks of a rank that is stopped."""


MAX_CALLS, _LEAST_CALLS, _MAX_CALLS_OF_POD = 32, 4, 1024
MAX_STACK_BYTES = 8 * 1024
"""The largest stack of a rank's main thread."""
MAIN_THREAD = "Current thread "


def main_thread(text: str, ranks: int) -> str:
    """Return the innermost calls of the thread that answered, which is the main one, in what faulthandler has written,
    and its last collective calls, if they are known; the begin of a text that is something else.

    ranks: of the pod, which share what an answer may have. With as many ranks it is as many calls, whatever their
    length: the stacks of two ranks stay alike.
    """
    _, found, rest = text.partition(MAIN_THREAD)
    calls = max(_LEAST_CALLS, min(MAX_CALLS, _MAX_CALLS_OF_POD // max(1, ranks)))
    lines = rest.partition("\n\n")[0].partition("\nThread ")[0].split("\n", calls + 1)[: calls + 1]
    if not found:
        return text[:MAX_STACK_BYTES]
    return with_collectives((found + "\n".join(lines))[:MAX_STACK_BYTES], shortest(collectives_below(text)))


def with_collectives(text: str, collectives: Iterable[Collective]) -> str:
    """Return the stacks of a rank with its last collective calls below."""
    below = lines_of(collectives)
    return f"{text.rstrip()}\n\n{below}" if below else text


def without_collectives(stacks: Mapping[str, str]) -> dict[str, str]:
    """Return the stacks of ranks alone."""
    return {rank: text.partition(f"\n\n{HEADER}")[0] for rank, text in stacks.items()}


def main_thread_first(text: str) -> str:
    """Return the stacks of a rank with those of its main thread before all others."""
    threads = text.strip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith(MAIN_THREAD)))


def decode_stacks(data: bytes, ranks: range, most: int = MAX_STACKS_ANSWER_BYTES) -> dict[int, str]:
    """Return the stacks of these ranks in an agent's answer to `/v1/stacks`; none where something else gave it, or more
    than `most` bytes."""
    if len(data) > most:
        return {}
    try:
        found = Stacks.model_validate_json(data).stacks
    except ValueError:
        return {}
    return {rank: text for rank in ranks if (text := found.get(str(rank)))}
