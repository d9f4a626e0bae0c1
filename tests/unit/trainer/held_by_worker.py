"""A worker of a job with parameter servers that writes what it holds at most, and activations, into a file."""

import json
import os
from pathlib import Path
from typing import Any

from disttrain_trainer.estimate.imagined import WatchedPrecision
from disttrain_trainer.estimate.meter import StorageMeter
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.worker import Worker
from disttrain_trainer.program import run
from disttrain_trainer.runtime.leaving import leave
from disttrain_trainer.runtime.stop import StopRequest


def count() -> None:
    meter, found, peaks = StorageMeter(), dict[str, int](), list[int]()
    compute, begin_push = Worker.compute, Servers.begin_push
    file = Path(os.environ["HELD_BYTES"], f"rank-{os.environ['RANK']}.json")

    def counted(worker: Worker, *args: Any) -> Any:
        state = worker.state
        meter.show([*state.module.parameters(), *state.module.buffers()])
        meter.show(value for one in state.optimizer.state.values() for value in one.values())
        found.clear()
        meter.peak = meter.live
        state.precision = WatchedPrecision(
            state.precision, lambda: found.setdefault("activations", meter.peak - found["before"]) and None
        )
        with meter.counting():
            result = compute(worker, *args)
        peaks.append(max(meter.peak, found["earlier"]))
        file.write_text(json.dumps({"peak": max(peaks), "activations": found["activations"]}))
        return result

    def begun(servers: Servers, *args: Any) -> Any:
        # Before that the optimizer's state may have come, which is no part of a forward pass.
        found.update(before=meter.live, earlier=meter.peak)
        meter.peak = meter.live
        return begin_push(servers, *args)

    Worker.compute, Servers.begin_push = counted, begun  # type: ignore[method-assign]


if __name__ == "__main__":
    count()
    leave(run(StopRequest.on_sigterm()))
