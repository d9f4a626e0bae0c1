"""What a rank is said to compute and send is what the sockets of a real rank send, and what arithmetic says."""

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_api.builtin import GptConfig
from disttrain_api.collectives import Operation, bus_factor
from disttrain_api.parallelism import AllReduce
from disttrain_trainer.collectives.schedules import SCHEDULES
from disttrain_trainer.estimate.counter import Message, operation_of
from disttrain_trainer.estimate.step import StepWork
from disttrain_trainer.models.gpt.model import Gpt
from tests.unit.trainer.server_jobs import a_job, ended
from tests.unit.trainer.test_estimate import (
    BMUF,
    CONTEXT,
    DEEP,
    EXPERT,
    FEW,
    GPT,
    LITTLE,
    LLAMA,
    SHARD,
    TENSOR,
    TRAINING,
    TWO_BUCKETS,
    compressed,
    estimated,
    local,
)
from tests.unit.trainer.worlds import job, run_ranks

PIPELINE = {"pipelineParallelDegree": 2}
UNTIED = {"model": {"name": "gpt", "config": {**GPT["config"], "tieWeights": False}}}
# Every token goes to every expert, and no batch is padded, whose tokens would go to none: data make no difference.
EVEN = {
    "model": {"name": "gpt", "config": {**UNTIED["model"]["config"], "experts": 2, "expertsPerToken": 2}},
    "data": {"name": "synthetic", "config": {"kind": "Tokens", "size": 1600, "sequenceLength": 32}},
}


ASYNC = {"parameterServer": {"synchronization": "Async"}}
# parallelism, changes of the training
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({}, {}),
    "dp2, accumulated": ({}, {"gradientAccumulationSteps": 4}),
    "fsdp2": ({SHARD: 2}, {}),
    "fsdp2, accumulated, recomputed": ({SHARD: 2}, {"gradientAccumulationSteps": 4, "activationCheckpointing": "Full"}),
    "tp2": ({TENSOR: 2}, {}),
    "tp2, sequence": ({TENSOR: 2, "sequenceParallel": True}, {}),
    "cp2": ({CONTEXT: 2}, {}),
    "pp2": (PIPELINE, {}),
    "pp2, tied": (PIPELINE, {"gradientAccumulationSteps": 2}),
    "pp2, interleaved": ({**PIPELINE, "pipeline": {"schedule": "LoopedBFS"}}, UNTIED),
    "pp2, zero bubble": ({**PIPELINE, "pipeline": {"schedule": "ZBVZeroBubble"}}, UNTIED),
    "local sgd": (local(), {}),
    "local sgd, outer optimizer, averaged state": (local(outerOptimizer={}, optimizerState="Average"), {}),
    "local sgd, BMUF": (BMUF, {}),
    "fsdp2 + ep2": (EXPERT, EVEN),
}
# So wide that the training loop's own sums, of 1.5 KiB with their headers, are little beside a bit for each number.
WIDE = {"model": {"name": "gpt", "config": {**GPT["config"], "width": 128}}}
COMPRESSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2, FP16": (compressed("FP16"), WIDE),
    "dp2, FP16 in a ring": ({"dataParallel": {"allReduce": "Ring", "compression": {"name": "FP16"}}}, WIDE),
    "dp2, BF16": (compressed("BF16"), WIDE),
    "dp2, Int8": (compressed("Int8"), WIDE),
    "dp2, OneBit": (compressed("OneBit", warmupSteps=2), WIDE),
    "dp2, TopK": (compressed("TopK", ratio=0.1), WIDE),
    "dp2, RandomK": (compressed("RandomK", ratio=0.1), WIDE),
    "dp2, PowerSGD": (compressed("PowerSGD", rank=8), WIDE),
}


def work_of(
    training: dict[str, Any], ranks: int, parallelism: dict[str, Any], rank: int = 0, pods: int = 1, servers: int = 0
) -> StepWork:
    found = estimated(training, ranks, parallelism, rank, ranks // pods if pods > 1 else 1, servers)
    assert found.work is not None, found.unknown
    return found.work


def sent_by_gloo(one: Message) -> float:
    """Bytes that a rank sends in a step, on average: gloo reduces and scatters by an all-reduce."""
    operation = Operation(one.operation)
    factor = bus_factor(Operation.ALL_REDUCE if operation is Operation.REDUCE_SCATTER else operation, one.ranks)
    return factor * one.bytes / one.every


@pytest.mark.parametrize("layout", [*LAYOUTS, *COMPRESSED])
def test_sockets_send_what_was_estimated(tmp_path: Path, layout: str) -> None:
    parallelism, changes = (LAYOUTS | COMPRESSED)[layout]
    training = {**TRAINING, "steps": 100, **changes}
    where = {"SENT_BYTES": str(tmp_path), "module": "tests.unit.trainer.sent_bytes"}
    for rank in run_ranks(tmp_path / "world", job(training, parallelism=parallelism), 2, **where):
        assert rank.code == 0, rank.err
    for rank in range(2):
        real = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        work = work_of(training, 2, parallelism, rank)
        assert sum(map(sent_by_gloo, work.messages)) == pytest.approx(real, rel=0.03), work


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_what_one_would_compute(layout: str) -> None:
    parallelism, changes = LAYOUTS[layout]
    training = {**TRAINING, **changes}
    alone = work_of({**training, "gradientAccumulationSteps": 1}, 1, {}).flops
    for _ in range(2):
        # What DTensor looks up the first time is not counted either.
        assert sum(work_of(training, 2, parallelism, rank).flops for rank in range(2)) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({"compression": {"name": "TopK", "ratio": 0.1}}, {}),
        ({"compression": {"name": "TopK", "ratio": 0.1}, **ASYNC}, FEW | {"maxGradientNorm": 1.0}),
        ({"compression": {"name": "TopK", "ratio": 0.1, "warmupSteps": 3}}, FEW),
        ({"compression": {"name": "OneBit"}}, FEW),
        ({"compression": {"name": "FP16"}}, FEW),
        ({"parameterServer": {"push": "Parameters"}}, FEW),
    ],
    ids=["gradients", "TopK", "TopK, clipped", "TopK, warm-up", "OneBit", "FP16", "parameters"],
)
def test_workers_push_pull_and_hold_what_was_estimated(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    training = {**TRAINING, **changes, "steps": 6, "logging": {"interval": 1}}
    counting = {"module": "tests.unit.trainer.held_by_worker", "HELD_BYTES": str(tmp_path)}
    with a_job(tmp_path, training, servers=2, workers=counting, **settings) as running:
        for rank, worker in enumerate(running.workers):
            assert ended(worker, rank)[0] == 0, worker.text(rank, "err")
    parallelism = {"dataParallel": {"mode": "ParameterServer", **settings}}
    warmup = settings.get("compression", {}).get("warmupSteps", 0)
    estimate = estimated(training, 2, parallelism, servers=2)
    for rank in range(2):
        real = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert estimate.activations == pytest.approx(real["activations"], rel=0.05)
        # What the first step sends is taken to be there with what later ones keep.
        most = 1.25 if warmup else 1.05
        assert 0.95 * real["peak"] <= estimate.peak <= most * real["peak"]
    assert estimate.unknown is None
    assert estimate.work is not None
    found = estimate.work.servers
    assert found is not None
    assert (found.workers, found.servers) == (2, 2)
    lines = [line for line in running.lines() if "comm/gradient_bytes" in line][1 + warmup : -1]
    assert lines
    # The leader may have had one part of a step or both; who updates the parameters has the optimizer's state, too.
    assert {line["comm/gradient_bytes"] % found.pushed for line in lines} == {0}
    pulled = (
        found.pulled
        if settings.get("parameterServer", {}).get("push") is None
        else estimated(TRAINING, 1, {}).parameters
    )
    assert {line["servers/pulled_bytes"] % pulled for line in lines} == {0}


TOP_K = {"compression": {"name": "TopK", "ratio": 0.1}}
# degrees of a worker of two ranks, settings of data parallelism, changes of the training
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp2": ({}, {}, {}),
    "dp2, few": ({}, {}, TWO_BUCKETS),
    "dp2, TopK": ({}, TOP_K, TWO_BUCKETS),
    "fsdp2": ({SHARD: 2}, {}, {}),
    "fsdp2, few": ({SHARD: 2}, {}, TWO_BUCKETS),
    "fsdp2, few tokens": ({SHARD: 2}, {}, {**LITTLE, "model": DEEP}),
    "fsdp2, clipped": ({SHARD: 2}, {"parameterServer": ASYNC["parameterServer"]}, FEW | {"maxGradientNorm": 1.0}),
    "tp2": ({TENSOR: 2}, {}, {"model": DEEP}),
}


@pytest.mark.parametrize("layout", GROUPS)
def test_ranks_that_are_one_worker_hold_what_was_estimated(tmp_path: Path, layout: str) -> None:
    degrees, settings, changes = GROUPS[layout]
    servers = {"groupReduce": "WithinGroup", **settings.get("parameterServer", {})}
    settings = {**settings, "parameterServer": servers}
    training = {**TRAINING, **changes, "steps": 6, "logging": {"interval": 1}}
    pod = {
        "module": "tests.unit.trainer.held_by_worker",
        "HELD_BYTES": str(tmp_path),
        "ranks_per_pod": 2,
        "degrees": degrees,
    }
    with a_job(tmp_path, training, workers=pod, **settings) as running:
        (worker,) = running.workers
        for rank in worker.ended():
            assert rank.code == 0, rank.err
    parallelism = {"dataParallel": {"mode": "ParameterServer", **settings}, **degrees}
    for rank in range(2):
        real = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        found = estimated(training, 2, parallelism, rank, ranks_per_pod=2, servers=1)
        # When gloo lets go of what the ranks were given is not known, which is much beside few activations.
        if not FEW.items() <= changes.items() and changes.get("data") is None:
            assert found.activations == pytest.approx(real["activations"], rel=0.05)
        assert found.peak == pytest.approx(real["peak"], rel=0.05)
        assert found.unknown is None
        assert found.work is not None
        traffic = found.work.servers
        assert traffic is not None
        assert (traffic.workers, traffic.servers) == (1, 1)
        lines = [line for line in running.lines() if "comm/gradient_bytes" in line][1:-1]
        assert {line["comm/gradient_bytes"] for line in lines} == {traffic.pushed}
        assert {line["servers/pulled_bytes"] for line in lines} == {traffic.pulled}


def test_stages_hand_the_counts_of_experts_on() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
    plain, pooled = (
        work_of(
            {**TRAINING, "model": {"name": "transformers", "config": {"config": config | asked}}},
            2,
            {**PIPELINE, "pipeline": {"schedule": "Interleaved1F1B", "microbatches": 4}},
        ).messages
        for asked in ({}, {"output_router_logits": True})
    )
    # Rank 0 has stages 0 and 2 of 4: with each of 4 microbatches it hands on twice forward and once backward.
    differ = [
        (after.calls - before.calls, after.bytes - before.bytes) for before, after in zip(plain, pooled, strict=True)
    ]
    assert [one for one in differ if any(one)] == [(12, 12 * 4 * 8)]


def test_a_step_has_the_flops_that_the_model_says() -> None:
    config = GptConfig(layers=3, heads=4, width=64, vocabulary_size=256, sequence_length=32)
    found = work_of(TRAINING, 1, {})
    assert found.messages == []
    # The model says 6 per parameter, of biases and norms, too; attention's backward pass computes its scores anew.
    assert found.flops == pytest.approx(16 * 32 * Gpt(config).flops_per_token(), rel=0.05)


def test_replicas_that_average_in_their_pods_meet_all_others_less_often() -> None:
    pods = local(globalPeriod=6)
    (among, within) = work_of({**TRAINING, "steps": 100}, 4, pods, pods=2).messages
    # After the sixth step all meet, and not the pods before them.
    assert (within.ranks, within.within_pod, within.every) == (2, True, 6)
    assert (among.ranks, among.within_pod, among.every) == (4, False, 6)
    assert within.bytes == 2 * among.bytes


def test_neighbours_send_along_the_pipeline() -> None:
    found = work_of({**TRAINING, **UNTIED}, 4, {"pipelineParallelDegree": 4}, rank=1).messages
    (sent,) = (one for one in found if one.operation == "send-recv")
    # Outputs and gradients of four microbatches of four samples, to the one side and to the other.
    assert (sent.axis, sent.ranks, sent.calls, sent.bytes) == ("pipeline", 2, 8, 8 * 4 * 32 * 64 * 4)


@pytest.mark.parametrize("algorithm", ["Ring", "Tree", "Central"])
def test_all_reduces_by_messages_send_what_their_schedule_says(algorithm: str) -> None:
    parallelism = {"dataParallel": {"allReduce": algorithm}}
    gradients = estimated(TRAINING, 1, {}).gradients
    for rank in (0, 3):
        (sent,) = work_of(TRAINING, 4, parallelism, rank).messages
        schedule = SCHEDULES[AllReduce(algorithm)](4)
        assert (sent.operation, sent.axis) == ("send-recv", "replicate")
        assert (sent.bytes, sent.calls) == (schedule.sent(rank, gradients // 4, 4), len(schedule.rounds))


def test_a_group_is_found_along_its_axis() -> None:
    found = work_of(TRAINING, 8, {SHARD: 2, TENSOR: 2}).messages
    axes = {(one.operation, one.axis, one.ranks) for one in found}
    assert {("all-gather", "shard", 2), ("reduce-scatter", "shard", 2), ("all-reduce", "replicate", 2)} <= axes
    assert ("all-reduce", "tensor", 2) in axes
    (norm,) = (one for one in found if one.axis == "world")
    assert (norm.operation, norm.ranks, norm.bytes) == ("all-reduce", 8, 4)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("c10d::_allgather_base_", "all-gather"),
        ("c10d::_reduce_scatter_base_", "reduce-scatter"),
        ("c10d::reduce_", "reduce"),
        ("c10d::alltoall_base_", "all-to-all"),
        ("c10d::send", "send-recv"),
        ("c10d::recv_", None),
        ("c10d::barrier", None),
        ("_c10d_functional::all_to_all_single", "all-to-all"),
        ("_c10d_functional::wait_tensor", None),
        ("aten::scatter", None),
    ],
)
def test_operators_are_known_by_their_names(name: str, operation: str | None) -> None:
    assert operation_of(name) == operation
