"""Layouts of a job, each estimated by the trainer's own build, in the order of the time of a step."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from disttrain.errors import CommandError
from disttrain.planning.candidates import TOO_LARGE, Candidate, Ranking
from disttrain.planning.cost import Machine, step_time
from disttrain.planning.layouts import Layout, pipeline_ranks, sparing
from disttrain.planning.memory import read_answer
from disttrain.planning.rank import RankMemory, on_one_gpu
from disttrain.planning.trainer import Request, answers
from disttrain_api.spec import DistTrainingJob

Answers = Callable[[Sequence[Request]], Generator[Mapping[str, Any], None, None]]


def rank_layouts(
    job: DistTrainingJob,
    layouts: Sequence[Layout],
    machine: Machine,
    device_bytes: int | None,
    within_seconds: float,
    progress: Callable[[int, int], None],
    ask: Answers = answers,
    clock: Callable[[], float] = time.monotonic,
) -> Ranking:
    """Estimate the layouts, and what those that do not fit could do to need less. Raises CommandError.

    progress: called with how many layouts are done, and how many there are.
    """
    deadline = clock() + within_seconds
    ranking = Ranking(device_bytes, machine, [])
    spared = {id(layout): sparing(layout) for layout in layouts}
    waiting, done = [(layout, layout) for layout in layouts], 0
    while waiting:
        retried = []
        with closing(_estimated(job, [layout for layout, _ in waiting], machine, device_bytes, ask)) as found:
            for _, original in waiting:
                if clock() > deadline:
                    ranking.unasked += 1
                    continue
                candidate = next(found)
                smaller = next(spared[id(original)], None) if candidate.reason == TOO_LARGE else None
                if smaller is not None:
                    retried.append((smaller, original))
                else:
                    ranking.candidates.append(candidate)
                    done += 1
                    progress(done, len(layouts))
        waiting = retried
    return ranking


def _estimated(
    job: DistTrainingJob, layouts: Sequence[Layout], machine: Machine, device_bytes: int | None, ask: Answers
) -> Generator[Candidate, None, None]:
    jobs = [layout.applied_to(job) for layout in layouts]
    with closing(ask([Request(one, rank) for one in jobs for rank in pipeline_ranks(one)])) as answered:
        for layout, one in zip(layouts, jobs, strict=True):
            raw = [(rank, next(answered)) for rank in pipeline_ranks(one)]
            try:
                memories = [read_answer(one, rank, answer) for rank, answer in raw]
            except CommandError as error:
                yield Candidate(layout, one, reason=str(error))
            else:
                yield _judged(layout, one, memories, machine, device_bytes)


def _judged(
    layout: Layout, job: DistTrainingJob, memories: Sequence[RankMemory], machine: Machine, device_bytes: int | None
) -> Candidate:
    needed = max((memory.needed for memory in memories if memory.needed is not None), default=None)
    works = [memory.work for memory in memories if memory.work is not None]
    if len(works) < len(memories):
        unknown = next(memory.unknown for memory in memories if memory.work is None)
        return Candidate(layout, job, needed, reason=unknown or "no step could be followed")
    slowest = max((step_time(work, machine) for work in works), key=lambda one: one.total)
    reason = None
    if device_bytes is not None and needed is not None and needed > device_bytes and on_one_gpu(job.spec):
        reason = TOO_LARGE
    elif any(memory.peak is None for memory in memories):
        # What is known in part shows what does not fit, and not what does.
        needed = None
    return Candidate(layout, job, needed, slowest, reason)
