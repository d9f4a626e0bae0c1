"""Agents of many jobs, as one server: prints its port, then answers each token's /v1/status until stdin ends.

    python -m benchmarks.simulated_agents

A token is the uid of a job. Its ranks have done another step with each answer. The token of a pod of a gang that hangs
says more (`HangingPod`): its ranks end no step from then on, and tell where they are.
"""

import asyncio
import itertools
import json
import sys
import time
from typing import NamedTuple

from aiohttp import web

from disttrain_api.names import TOKEN_HEADER
from disttrain_api.report import AgentStatus, CheckpointReport, RankPhase, RankReport, RankStatus, StepPace
from disttrain_api.stacks import MAX_CALLS, STOPPED

RANKS = 8
"""Ranks of a pod."""
PACE = StepPace(still_seconds=0.1, median_seconds=0.5, longest_seconds=0.6)
_STACKS_SECONDS = 0.11
"""What an agent takes at least: it looks twice, 50 ms apart, whether a rank still writes its stacks."""
_WAITS = "Current thread 0x1 (most recent call first):\n" + MAX_CALLS * (
    '  File "/usr/local/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce\n'
)
_CHECKPOINT = CheckpointReport(step=1, path="/storage/checkpoints/step-1", time="2026-01-01T00:00:00Z")


class HangingPod(NamedTuple):
    """A pod of a gang that hangs. Its token has all of this."""

    job_uid: str
    index: int
    victim: int
    """The pod whose last rank is stopped."""
    began: float
    """When, by the machine's monotonic clock."""

    @property
    def token(self) -> str:
        """What its agent is asked with."""
        return "/".join(map(str, self))

    @classmethod
    def of(cls, token: str) -> "HangingPod | None":
        """Return what a token says; None where it is the uid of a job alone."""
        uid, *more = token.split("/")
        return cls(uid, int(more[0]), int(more[1]), float(more[2])) if more else None


def training_ranks(step: int, first: int = 0, still_seconds: float = PACE.still_seconds) -> list[RankStatus]:
    """The ranks of a pod, of which all have done this step, so many seconds ago."""
    pace = PACE.model_copy(update={"still_seconds": still_seconds})
    report = RankReport(
        rank=0, step=step, total_steps=10**9, loss=1.5, samples_per_second=1000.0, remaining_seconds=3600.0,
        phase=RankPhase.TRAINING, checkpoint=_CHECKPOINT,
    )  # fmt: skip
    return [
        RankStatus(
            rank=rank,
            pid=1000 + rank,
            seconds_since_step=0.5,
            report=report.model_copy(update={"rank": rank}),
            pace=pace,
        )
        for rank in range(first, first + RANKS)
    ]


async def stacks(request: web.Request) -> web.Response:
    """Where the ranks of a pod are that hangs."""
    await asyncio.sleep(_STACKS_SECONDS)
    pod = HangingPod.of(request.headers[TOKEN_HEADER])
    assert pod is not None
    texts = {str(pod.index * RANKS + rank): _WAITS for rank in range(RANKS)}
    if pod.index == pod.victim:
        texts[str(pod.index * RANKS + RANKS - 1)] = STOPPED
    return web.Response(text=json.dumps({"stacks": texts}), content_type="application/json")


async def serve() -> None:
    steps = itertools.count(1)

    async def status(request: web.Request) -> web.Response:
        pod, token = HangingPod.of(request.headers[TOKEN_HEADER]), request.headers[TOKEN_HEADER]
        first, uid = (0, token) if pod is None else (pod.index * RANKS, pod.job_uid)
        still = PACE.still_seconds if pod is None else max(PACE.still_seconds, time.monotonic() - pod.began)
        ranks = training_ranks(next(steps), first, still)
        answer = AgentStatus(job_uid=uid, attempt=1, ranks=ranks)
        text = answer.model_dump_json(by_alias=True, exclude_none=True)
        return web.Response(text=text, content_type="application/json")

    application = web.Application()
    application.router.add_get("/v1/status", status)
    application.router.add_get("/v1/stacks", stacks)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
