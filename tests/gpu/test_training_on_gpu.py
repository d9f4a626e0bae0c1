"""The trainer on one GPU, as a process: it learns, in each number format, and does what the manifest says."""

import json
import math
import os
import pickle
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from disttrain_api.compute import Attention
from tests.gpu.worlds import Results, beside_each_other, ended, run_on_gpu, worlds_of
from tests.unit.trainer.worlds import Ended, job, launch, small, user

pytestmark = pytest.mark.gpu_only

LOSS = "loss_metrics/global_avg_loss"
HAS_TORCHAO = find_spec("torchao") is not None
SINGLE = 1e-5
"""What twenty steps make of FP32 sums in another order, of numbers that are added up in no order on a GPU."""
PRECISIONS = ("FP32", "TF32", "BF16", "FP16")
DIGITS = {
    "model": {"name": "resnet"},
    "data": {"name": "digits"},
    "optimizer": {"name": "AdamW", "learningRate": 0.003},
    "steps": 120,
    "microBatchSize": 64,
    "logging": {"interval": 10},
}
TEXT = {
    "model": {"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 128}},
    "data": {"name": "text", "config": {"sequenceLength": 128}},
    "optimizer": {"name": "AdamW", "learningRate": 0.003},
    "steps": 60,
    "microBatchSize": 32,
    "maxGradientNorm": 1.0,
    "logging": {"interval": 1},
    "profiling": {"firstStep": 20, "steps": 1},
}


@dataclass
class Trained:
    """What one rank has left behind."""

    rank: Ended
    """The first, where there are several."""
    losses: list[float]
    trace: set[str]
    """Names of what was traced: operators and kernels."""


def train(
    folder, training: dict[str, Any], ranks: int = 1, parallelism: dict[str, Any] | None = None, **environment: str
) -> Trained:
    config = job(training, parallelism=parallelism)
    with launch(folder, config, ranks, storage=folder / "storage", device="cuda", **environment) as world:
        # Compiling takes its time where nothing is cached.
        rank, *_ = world.ended(within=180)
    metrics = folder / "storage" / "test" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    traces = (folder / "storage" / "test" / "profile").glob("rank-0-step-*.json")
    events = [event for file in traces for event in json.loads(file.read_text())["traceEvents"]]
    return Trained(rank, [line[LOSS] for line in lines if "lr" in line], {event.get("name", "") for event in events})


def nccl_log(folder) -> dict[str, str]:
    """Has NCCL write what it does into files of the folder, one for each process."""
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl-%p.log")}


def communicators(folder) -> int:
    """Files in which a communicator was made."""
    return sum("Init COMPLETE" in file.read_text() for file in folder.glob("nccl-*.log"))


@worlds_of("digits")
def start_digits(folder):
    return train(folder, DIGITS)


@worlds_of("NCCL")
def start_nccl(folder):
    """What is trained, and how many communicators it took."""
    # Gradients of sharded parameters have a norm that is summed over all ranks, be it one; offloaded ones are sharded.
    return train(folder, DIGITS | {"offload": {"parameters": True}}, **nccl_log(folder)), communicators(folder)


@pytest.mark.gpu_path("NCCL")
@pytest.mark.gpu_world("NCCL")
def test_one_rank_uses_nccl(world):
    found, count = world
    assert found.rank.code == 0, found.rank.err
    assert found.rank.report.metrics["accuracy"] >= 0.9
    assert count == 1


@pytest.mark.gpu_path("NCCL between GPUs")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_on_two_gpus_use_nccl(tmp_path):
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    config = job(DIGITS, parallelism={"dataParallelShardDegree": 2})
    with launch(tmp_path, config, ranks=2, device="cuda", **nccl_log(tmp_path), CUDA_VISIBLE_DEVICES=gpus) as world:
        first, second = ended(world)
    assert [first.code, second.code] == [0, 0], first.err + second.err
    assert first.report.metrics["accuracy"] >= 0.9
    assert communicators(tmp_path) == 2
    assert "ranks share a GPU" not in first.out


@pytest.mark.gpu_path("NCCL between GPUs")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_group_that_overlaps_computes_what_another_one_does(tmp_path):
    gpus = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}
    layout = {"tensorParallelDegree": 2, "sequenceParallel": True}
    found = {
        overlaps: train(
            tmp_path / str(overlaps), TEXT | {"compile": True}, 2, layout | {"asyncTensorParallel": overlaps}, **gpus
        )
        for overlaps in (False, True)
    }
    assert [one.rank.code for one in found.values()] == [0, 0], found[True].rank.err
    assert found[True].losses == pytest.approx(found[False].losses, rel=1e-3)


@worlds_of("shared")
def start_shared(folder):
    """How the ranks ended, and how many communicators they took."""
    with launch(folder, job(DIGITS), ranks=2, device="cuda", **nccl_log(folder)) as ranks:
        return ended(ranks), communicators(folder)


@pytest.mark.gpu_path("gloo on GPUs")
@pytest.mark.gpu_world("shared")
def test_two_ranks_on_one_gpu_say_that_they_share_it(world):
    (first, second), count = world
    assert [first.code, second.code] == [0, 0], first.err + second.err
    assert first.report.metrics["accuracy"] >= 0.9
    assert "ranks share a GPU" in first.out
    assert count == 0


@pytest.mark.gpu_path("training")
@pytest.mark.gpu_world("digits")
def test_digits_are_learned(world):
    assert world.rank.code == 0, world.rank.err
    assert world.rank.report.metrics["accuracy"] >= 0.9
    assert world.losses[-1] < world.losses[0] / 2


def formats() -> dict[str, dict[str, Any]]:
    """What the trainings are changed by, each from the same parameters on."""
    compiled = {"BF16, compiled": {"precision": "BF16", "compile": True}}
    return {precision: {"precision": precision} for precision in PRECISIONS} | compiled


@worlds_of("texts", first=True)
def start_texts(folder):
    """The gpt in each number format, and compiled."""
    changes = formats()
    failed = {}

    def start(name):
        try:
            return train(folder / name, TEXT | changes[name])
        except pytest.fail.Exception as error:
            failed[name] = str(error)

    trained = beside_each_other(*(partial(start, name) for name in changes))
    return Results(dict(zip(changes, trained, strict=True)), failed)


FORMATS = [
    pytest.param("FP32", marks=pytest.mark.gpu_path("training")),
    pytest.param("TF32", marks=pytest.mark.gpu_path("TF32")),
    pytest.param("BF16", marks=pytest.mark.gpu_path("BF16")),
    pytest.param("FP16", marks=pytest.mark.gpu_path("FP16 with its scaler")),
    pytest.param("BF16, compiled", marks=pytest.mark.gpu_path("compile")),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.gpu_world("texts")
class TestText:
    def test_it_is_learned(self, world, name):
        found = world[name]
        assert found.rank.code == 0, found.rank.err
        assert all(map(math.isfinite, found.losses))
        assert found.losses[-1] < 0.75 * found.losses[0]
        assert found.rank.report.metrics["loss"] < 0.75 * found.losses[0]


# At ten times this rate gradients jump twentyfold between the 7th and the 12th step, in FP32 as in the others, but not
# in the same step: there a loss says nothing about a format.
FOLLOWED = {**TEXT, "optimizer": {"name": "AdamW", "learningRate": 0.0003}, "steps": 20}
del FOLLOWED["profiling"]
UNITS = {"TF32": 2**-11, "FP16": 2**-11, "BF16": 2**-8, "BF16, compiled": 2**-8}
"""Half the distance of two numbers next to each other, from 1 on: the most by which one product is rounded. The mean
over thousands of tokens is rounded by far less, unless something is lost; what twenty steps add to it is small, too."""


FLOAT8 = {f"FP8 {recipe}": {"precision": "BF16", "float8": recipe} for recipe in ("Tensorwise", "Rowwise")}
KERNELS = {f"attention by {kernel}": {"precision": "BF16", "attention": kernel} for kernel in Attention}
SAME = {"chunked loss": {"loss": {"chunks": 4}}, "processes that load": {"dataWorkers": 2}}
"""What computes the same in FP32, but for the order of sums."""


@worlds_of("followed")
def start_followed(folder):
    changes = formats() | KERNELS | SAME | (FLOAT8 if HAS_TORCHAO else {})
    return run_on_gpu(folder, 1, {name: [{"training": FOLLOWED | changed}] for name, changed in changes.items()})


def require_followed(expected, found, unit):
    """Fails unless losses differ by no more than the unit, and norms of gradients by no more than four."""
    for key, bound in ((LOSS, unit), ("validation_metrics/global_avg_loss", unit), ("grad_norm", 4 * unit)):
        values = [[line[key] for line in result["metrics"] if key in line] for result in (expected, found)]
        assert values[0]
        assert values[1] == pytest.approx(values[0], rel=bound)


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.gpu_world("followed")
def test_it_follows_fp32(world, name):
    require_followed(world["FP32"], world[name], UNITS[name])


@pytest.mark.gpu_path("flash attention")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.gpu_world("followed")
def test_each_kernel_of_attention_follows_fp32(world, name):
    assert world[name]["errors"] == [None]
    require_followed(world["FP32"], world[name], UNITS["BF16"])


@pytest.mark.gpu_path("FP8")
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.gpu_world("followed")
def test_products_in_fp8_follow_fp32_and_are_not_those_in_bf16(world, name):
    # Three bits of mantissa.
    require_followed(world["FP32"], world[name], 2**-4)
    assert [line.get(LOSS) for line in world[name]["metrics"]] != [line.get(LOSS) for line in world["BF16"]["metrics"]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chunked loss", marks=pytest.mark.gpu_path("loss in chunks")),
        pytest.param("processes that load", marks=pytest.mark.gpu_path("processes that load data")),
    ],
)
@pytest.mark.gpu_world("followed")
def test_it_computes_the_same(world, name):
    assert world[name]["errors"] == [None]
    require_followed(world["FP32"], world[name], SINGLE)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}


@worlds_of("llama")
def start_llama(folder):
    model = {"name": "transformers", "config": {"config": LLAMA, "sequenceLength": 128}}
    cases = {name: [{"training": FOLLOWED | {"model": model} | formats()[name]}] for name in ("FP32", *LLAMA_FORMATS)}
    return run_on_gpu(folder, 1, cases)


LLAMA_FORMATS = ("BF16", "BF16, compiled")


@pytest.mark.gpu_path("transformers models")
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", LLAMA_FORMATS)
@pytest.mark.gpu_world("llama")
def test_a_llama_of_transformers_follows_fp32(world, name):
    require_followed(world["FP32"], world[name], UNITS[name])


@pytest.mark.parametrize("name", FORMATS[1:3])
@pytest.mark.gpu_world("texts")
def test_a_format_is_not_fp32_under_another_name(world, name):
    assert world[name].losses != world["FP32"].losses


@pytest.mark.gpu_path("compile")
@pytest.mark.gpu_world("texts")
def test_compiled_layers_are_kernels_of_their_own(world):
    made = [name for name in world["BF16, compiled"].trace if name.startswith("triton_")]
    assert made
    assert not [name for name in world["BF16"].trace if name.startswith("triton_")]


@pytest.mark.gpu_path("compile")
@pytest.mark.gpu_world("texts")
def test_a_compiled_loss_writes_no_logarithms_of_its_logits(world):
    """So that a large vocabulary does not cost three times its logits."""
    # Kernels that were compiled carry the operators' names, too: "triton_red_fused__log_softmax_...".
    assert "aten::_log_softmax" in world["BF16"].trace
    assert "aten::_log_softmax" not in world["BF16, compiled"].trace


@pytest.mark.gpu_path("flash attention")
@pytest.mark.parametrize("name", ["BF16", "FP16", "BF16, compiled"])
@pytest.mark.gpu_world("texts")
def test_the_trainer_attends_by_a_fused_kernel(world, name):
    fused = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
    assert any(kernel in event for event in world[name].trace for kernel in fused)


@worlds_of("scaled")
def start_scaled(folder):
    training = small(
        model={"entrypoint": "tests.gpu.user_gpu:loud"},
        data=user("float_samples"),
        precision="FP16",
        optimizer={"name": "AdamW", "learningRate": 0.001},
        steps=30,
        logging={"interval": 1},
    )
    run = {"training": training}
    cases = {"through": [run], "resumed": [{**run, "stop_after": 20}, run]}
    return run_on_gpu(folder, 1, cases)


@pytest.mark.gpu_path("FP16 with its scaler")
@pytest.mark.gpu_world("scaled")
def test_the_scale_falls_where_gradients_overflow(world):
    through = world["through"]
    assert through["errors"] == [None]
    # It starts at 2^16 and halves; gradients of about 1,000 times that do not fit FP16.
    assert 1 <= through["scale"] < 2**16
    assert all(math.isfinite(line[LOSS]) for line in through["metrics"] if "lr" in line)


@pytest.mark.gpu_path("FP16 with its scaler")
@pytest.mark.gpu_world("scaled")
def test_the_scale_is_restored_from_a_checkpoint(world):
    through, resumed = world["through"], world["resumed"]
    assert "stopped after step 20" in resumed["errors"][0]
    assert resumed["errors"][1] is None
    # Begun anew it would overflow again, and leave steps out.
    assert resumed["scale"] == through["scale"]
    losses = [[line[LOSS] for line in result["metrics"] if "lr" in line] for result in (through, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@worlds_of("snapshot")
def start_greedy(folder):
    """How the rank ended, and what it wrote."""
    training = small(
        model={"entrypoint": "tests.gpu.user_gpu:greedy"},
        data=user("float_samples"),
        profiling={"firstStep": 5, "steps": 1, "memorySnapshot": True},
    )
    rank = train(folder, training).rank
    file = folder / "storage" / "test" / "profile" / "rank-0-memory.pickle"
    return rank, pickle.loads(file.read_bytes()) if file.exists() else {}


@pytest.mark.gpu_path("memory snapshot")
@pytest.mark.gpu_world("snapshot")
def test_a_full_gpu_leaves_a_snapshot(world):
    rank, snapshot = world
    assert rank.code == 1
    assert "OutOfMemoryError" in rank.report.error.message
    assert {"segments", "device_traces"} <= snapshot.keys()
