"""A worker of a job with parameter servers that writes what it holds at most, and activations, into a file.

At most in most tasks: in some, gloo lets go later of what the ranks were given, which is by chance.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import Any

from disttrain_trainer.estimate.imagined import WatchedPrecision
from disttrain_trainer.estimate.meter import StorageMeter
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.group import GroupServers
from disttrain_trainer.parameter_server.worker.worker import Worker
from disttrain_trainer.program import run
from disttrain_trainer.runtime.leaving import leave
from disttrain_trainer.runtime.stop import StopRequest


def count() -> None:
    meter, found = StorageMeter(), dict[str, int]()
    peaks: dict[str, list[int]] = {"pull": [0], "compute": []}
    compute, settle, begin_pull = Worker.compute, Worker._settle_gradients, GroupServers.begin_pull
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
        peaks["compute"].append(max(meter.peak, found["earlier"]))
        peak = max(map(median_low, peaks.values()))
        file.write_text(json.dumps({"peak": peak, "activations": found["activations"]}))
        return result

    def begun(begin_push: Callable[..., Any]) -> Callable[..., Any]:
        def counted_apart(*args: Any) -> Any:
            # Before that the optimizer's state may have come, which is no part of a forward pass.
            found.update(before=meter.live, earlier=meter.peak)
            meter.peak = meter.live
            return begin_push(*args)

        return counted_apart

    def pulled(servers: GroupServers, *args: Any, **options: Any) -> Any:
        meter.show(servers._full_parameters.whole.values())
        meter.peak = meter.live
        with meter.counting():
            result = begin_pull(servers, *args, **options)
        if found:
            peaks["pull"].append(meter.peak)
        return result

    def settled(worker: Worker) -> None:
        # Nothing is done to gradients that another rank pushes.
        meter.show(one.grad for one in worker.state.parameters if one.grad is not None)
        settle(worker)

    Worker.compute, Worker._settle_gradients = counted, settled  # type: ignore[method-assign]
    Servers.begin_push, GroupServers.begin_push = begun(Servers.begin_push), begun(GroupServers.begin_push)  # type: ignore[method-assign]
    GroupServers.begin_pull = pulled  # type: ignore[method-assign]


if __name__ == "__main__":
    count()
    leave(run(StopRequest.on_sigterm()))
