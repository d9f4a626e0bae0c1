"""Jobs that have done their work end with exit code 0, every time: gloo's threads can abort a process at its end."""

import signal

import pytest

from tests.soak import SOAK
from tests.unit.trainer.layouts import GPT, PIPELINE, SHARD, TENSOR
from tests.unit.trainer.server_jobs import a_job, ended, signalled
from tests.unit.trainer.worlds import job, launch, small, user
from tests.waiting import GENEROUS

RUNS = 20 if SOAK else 1
UNTIED = GPT | {"model": user("double_gpt", tieWeights=False)}
MOE = {"model": user("double_moe_gpt"), "data": user("double_tokens")}


# ranks, parallelism, what is trained
KINDS = {
    "replicas": (2, {}, GPT),
    "shards": (2, {SHARD: 2}, GPT),
    "tensor": (2, {TENSOR: 2}, GPT),
    "pipeline": (2, {PIPELINE: 2}, GPT),
    "zero bubble": (2, {PIPELINE: 2, "pipeline": {"schedule": "ZBVZeroBubble"}}, GPT),
    "experts": (2, {SHARD: 2, "expertParallelDegree": 2}, MOE),
    "ring": (2, {"dataParallel": {"allReduce": "Ring"}}, GPT),
    "compressed": (2, {"dataParallel": {"compression": {"name": "TopK", "ratio": 0.1}}}, GPT),
    "LocalSGD": (2, {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 2}}}, GPT),
    "PipeDream": (2, {PIPELINE: 2, "pipeline": {"schedule": "PipeDream"}}, UNTIED),
    **({"three dimensions": (8, {PIPELINE: 2, SHARD: 2, TENSOR: 2}, GPT)} if SOAK else {}),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_run_ends_well(tmp_path, kind):
    size, parallelism, what = KINDS[kind]
    for run in range(RUNS):
        training = small(steps=3, **what, checkpoint={"interval": 1})
        folder = tmp_path / f"{run}"
        with launch(folder, job(training, parallelism=parallelism), size, storage=folder) as world:
            ranks = world.ended()
        assert [rank.code for rank in ranks] == [0] * size, f"run {run}: " + "\n".join(rank.err for rank in ranks)
        assert all(rank.report.done for rank in ranks)


@pytest.mark.skipif(not SOAK, reason="test_parameter_server_faults.py sees one such end")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("synchronization", ["Sync", "Async"])
def test_every_run_with_servers_ends_well(tmp_path, synchronization):
    for run in range(RUNS):
        folder = tmp_path / f"{run}"
        folder.mkdir()
        settings = {"parameterServer": {"synchronization": synchronization}}
        with a_job(folder, small(steps=3), servers=2, **settings) as running:
            ends = [ended(worker, rank) for rank, worker in enumerate(running.workers)]
            for server in running.servers:
                signalled(server, signal.SIGTERM)
            codes = [server.processes[0].wait(GENEROUS) for server in running.servers]
        assert ([code for code, _ in ends], codes) == ([0, 0], [0, 0]), f"run {run}"
        assert ends[0][1].done
