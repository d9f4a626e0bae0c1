"""Agents of many jobs, as one server: prints its port, then answers each token's /v1/status until stdin ends.

    python -m benchmarks.simulated_agents

A token is the uid of a job. Its ranks have done another step with each answer.
"""

import asyncio
import itertools
import sys

from aiohttp import web

from disttrain_api.names import TOKEN_HEADER
from disttrain_api.report import AgentStatus, CheckpointReport, RankPhase, RankReport, RankStatus, StepPace

RANKS = 8
"""Ranks of a pod."""
_PACE = StepPace(still_seconds=0.1, median_seconds=0.5, longest_seconds=0.6)
_CHECKPOINT = CheckpointReport(step=1, path="/storage/checkpoints/step-1", time="2026-01-01T00:00:00Z")


async def serve() -> None:
    steps = itertools.count(1)

    async def status(request: web.Request) -> web.Response:
        report = RankReport(
            rank=0, step=next(steps), total_steps=10**9, loss=1.5, samples_per_second=1000.0, remaining_seconds=3600.0,
            phase=RankPhase.TRAINING, checkpoint=_CHECKPOINT,
        )  # fmt: skip
        ranks = [
            RankStatus(
                rank=rank,
                pid=1000 + rank,
                seconds_since_step=0.5,
                report=report.model_copy(update={"rank": rank}),
                pace=_PACE,
            )
            for rank in range(RANKS)
        ]
        answer = AgentStatus(job_uid=request.headers[TOKEN_HEADER], attempt=1, ranks=ranks)
        text = answer.model_dump_json(by_alias=True, exclude_none=True)
        return web.Response(text=text, content_type="application/json")

    application = web.Application()
    application.router.add_get("/v1/status", status)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
