"""Layouts of two ranks, on one GPU, compute what one process computes there: float64 to 1e-10, FP32 to 1e-6.

NCCL takes one rank per GPU, so these ranks talk through gloo (device.py): what is held here is the computing, the
copies to and from the host, and gloo's collectives of tensors on GPUs.
"""

import pytest
import torch

from tests.gpu.worlds import DEVICE, EVERYTHING, PATIENCE, beside_each_other, run_on_gpu, worlds_of
from tests.unit.trainer import test_moe as moe
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.layouts import ALL_LAYOUTS as LAYOUTS
from tests.unit.trainer.layouts import TRAININGS
from tests.unit.trainer.test_gradient_sums import DOUBLE, LOSSY, SENDS_ALL, WIDE
from tests.unit.trainer.worlds import run_cases

TOLERANCE = 1e-10
# What a GPU adds up in another order is rounded otherwise, and steps carry it on.
SINGLE = 1e-6
KEYS = ("loss_metrics/global_avg_loss", "grad_norm")
PATHS = {
    "dp": "gloo on GPUs",
    "fsdp": "shards (FSDP2)",
    "cp": "context parallelism",
    "tp": "tensor parallelism",
    "pp": "pipeline",
    "there and back": "pipeline, there and back",
    "one": "several devices of a process",
}
CHOSEN = {
    "dp": [
        "dp2, static graph, recomputed",
        "dp2, offloaded",
        "dp2, FP32, 20 steps",
        "dp2, AdamW, 20 steps, 4 passes",
        "dp2, resnet",
    ],
    "fsdp": ["fsdp2", "fsdp2, AdamW, accumulated", "fsdp2, recomputed", "fsdp2, offloaded", "fsdp2, FP32, 20 steps"],
    "cp": ["cp2", "cp2, AdamW, accumulated", "cp2, offloaded", "cp2, ring"],
    "tp": ["tp2", "tp2, AdamW, accumulated", "tp2, sequence", "tp2, vocabulary", "tp2, FP32, 20 steps"],
    "pp": [
        "pp2, GPipe",
        "pp2, 1F1B",
        "pp2, Interleaved1F1B",
        "pp2, LoopedBFS",
        "pp2, InterleavedZeroBubble",
        "pp2, FP32, 20 steps",
    ],
    "there and back": ["pp2, ZBVZeroBubble", "pp2, DualPipeV"],
    "one": ["one process, two devices", "one process, placed layers"],
}


def starting_with(prefix):
    """All layouts of one and two ranks whose name begins so."""
    # Ranks of one GPU overlap nothing.
    names = [name for name, (ranks, *_) in LAYOUTS.items() if ranks <= 2 and "overlapped" not in name]
    return [name for name in names if prefix_of(name).startswith(prefix)]


def prefix_of(name):
    """The name; but stages that a rank sends to itself are a path of their own."""
    return "there and back" if "ZBV" in name or "DualPipeV" in name else name


NAMES = {prefix: starting_with(prefix) if EVERYTHING else CHOSEN[prefix] for prefix in PATHS}


def case_of(name):
    _, training, parallelism, changes = LAYOUTS[name]
    return [{"training": {**TRAININGS[training], **changes}, "parallelism": parallelism}]


def start_of(prefix):
    """The layouts of a prefix, beside one process with the same trainings."""
    trainings = {LAYOUTS[name][1] for name in NAMES[prefix]}
    alone = {training: [{"training": TRAININGS[training]}] for training in sorted(trainings)}
    ranks = LAYOUTS[NAMES[prefix][0]][0]
    layouts = {name: case_of(name) for name in NAMES[prefix]}

    def start(folder):
        return beside_each_other(
            lambda: run_on_gpu(folder / "alone", 1, alone), lambda: run_on_gpu(folder / "together", ranks, layouts)
        )

    return start


for _prefix in PATHS:
    worlds_of(_prefix)(start_of(_prefix))


def tolerance_of(training):
    return SINGLE if "FP32" in training else TOLERANCE


def require_equal(expected, found, tolerance=TOLERANCE):
    assert found["errors"] == [None]
    losses = [line[KEYS[0]] for line in expected["metrics"] if "lr" in line]
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3), "to stand still alike would be equal, too"
    require_same(found["parameters"], expected["parameters"], tolerance)
    for key in KEYS:
        values = [[line[key] for line in result["metrics"] if key in line] for result in (expected, found)]
        assert values[0]
        assert values[1] == pytest.approx(values[0], rel=tolerance, abs=1e-14)


def of_world(name, path, prefix):
    """A parameter of a test whose worlds are those of a prefix."""
    return pytest.param(name, id=name, marks=[pytest.mark.gpu_path(path), pytest.mark.gpu_world(prefix)])


@pytest.mark.parametrize(
    "layout", [of_world(name, path, prefix) for prefix, path in PATHS.items() for name in NAMES[prefix]]
)
def test_a_layout_equals_one_process(world, layout):
    alone, together = world
    training = LAYOUTS[layout][1]
    require_equal(alone[training], together[layout], tolerance_of(training))


@pytest.mark.gpu_only
@pytest.mark.parametrize(
    "layout", [of_world("fsdp2, offloaded", "offload", "fsdp"), of_world("dp2, offloaded", "offload", "dp")]
)
def test_offloaded_parameters_lie_in_pinned_memory(world, layout):
    alone, together = world
    assert together[layout]["held"] == {"pinned"}
    assert alone[LAYOUTS[layout][1]]["held"] == {"cuda"}


FORMATS = ("FP32, dp2", "FP32, fsdp2 + ep2", "FP16, dp2", "BF16, dp2", "BF16, fsdp2 + ep2")
EXPERTS = [
    name
    for name, (ranks, *_) in moe.ALL_LAYOUTS.items()
    # What pipelines do is shown above; one shows that experts go through it.
    if ranks == 2 and (EVERYTHING or not name.startswith("pp") or name == "pp2, 1F1B")
]


@worlds_of("experts", first=True)
def start_experts(folder):
    """Results of one process, and of two ranks."""
    trainings = sorted({moe.ALL_LAYOUTS[name][1] for name in EXPERTS})
    alone = {name: [{"training": moe.TRAININGS[name]}] for name in trainings}
    cases = {}
    for name in EXPERTS:
        _, training, parallelism, changes = moe.ALL_LAYOUTS[name]
        cases[name] = [{"training": moe.TRAININGS[training] | changes, "parallelism": parallelism}]
    for name in FORMATS:
        _, training, parallelism = moe.OTHERS[name]
        cases[name] = [{"training": training, "parallelism": parallelism}]
    return beside_each_other(
        lambda: run_on_gpu(folder / "alone", 1, alone), lambda: run_on_gpu(folder / "together", 2, cases)
    )


@pytest.mark.gpu_path("expert parallelism")
@pytest.mark.gpu_world("experts")
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_equal_one_process(world, layout):
    alone, together = world
    require_equal(alone[moe.ALL_LAYOUTS[layout][1]], together[layout])


@pytest.mark.gpu_path("expert parallelism")
@pytest.mark.gpu_world("experts")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_other_formats_follow_fp32(world, name):
    _, together = world
    for key in KEYS:
        expected, found = (
            [line[key] for line in together[case]["metrics"] if key in line] for case in (FORMATS[0], name)
        )
        # FP16 has no norm where a gradient overflows and its step is left out.
        pairs = [pair for pair in zip(expected, found, strict=True) if None not in pair]
        assert len(pairs) >= len(expected) / 2
        for must, is_found in pairs:
            assert is_found == pytest.approx(must, rel=1e-4 if name.startswith("FP32") else 0.05)


COMPRESSED = list(LOSSY) if EVERYTHING else ["FP16", "Int8", "OneBit", "TopK with momentum", "PowerSGD"]
SENT = list(SENDS_ALL) if EVERYTHING else ["Ring", "Tree", "TopK of everything", "PowerSGD, warming up"]


@worlds_of("sums")
def start_sums(folder):
    cases = {"plain": [{"training": DOUBLE}], "plain, wide": [{"training": WIDE}]}
    cases |= {name: [{"training": DOUBLE, "parallelism": SENDS_ALL[name]}] for name in SENT}
    for name in COMPRESSED:
        run = {"training": WIDE, "parallelism": LOSSY[name]}
        cases |= {f"lossy {name}": [run], f"resumed {name}": [{**run, "stop_after": 3}, run]}
    return run_on_gpu(folder, 2, cases)


@pytest.mark.gpu_path("all-reduces and compression hooks")
@pytest.mark.gpu_world("sums")
@pytest.mark.parametrize("name", SENT)
def test_where_everything_is_sent_it_is_plain_ddp(world, name):
    require_equal(world["plain"], world[name])


@pytest.mark.gpu_path("all-reduces and compression hooks")
@pytest.mark.gpu_world("sums")
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_differ_and_still_learn(world, name):
    plain, found = world["plain, wide"], world[f"lossy {name}"]
    assert found["errors"] == [None]
    assert any(not torch.equal(found["parameters"][key], value) for key, value in plain["parameters"].items())
    losses = [line["loss_metrics/global_avg_loss"] for line in found["metrics"] if "lr" in line]
    assert losses[-1] < losses[0]


@pytest.mark.gpu_path("all-reduces and compression hooks")
@pytest.mark.gpu_world("sums")
@pytest.mark.parametrize("name", COMPRESSED)
def test_what_is_kept_of_gradients_is_restored(world, name):
    through, resumed = world[f"lossy {name}"], world[f"resumed {name}"]
    assert resumed["errors"][1] is None
    for parameter, value in through["parameters"].items():
        torch.testing.assert_close(resumed["parameters"][parameter], value, rtol=1e-4, atol=1e-6)


@worlds_of("moved")
def start_moved(folder):
    """By where it goes on: what is said where the job is stopped, and how it ends; and how it does without a stop."""
    run = {"training": TRAININGS["gpt, AdamW"]}
    found = {"": run_on_gpu(folder / "through", 1, {"through": [run]})["through"]}
    for number, (first, second) in enumerate((("cpu", DEVICE), (DEVICE, "cpu"))):
        at = folder / f"moved-{number}"
        # Fresh: other worlds start beside this one, and a server of forks is not made for that.
        stopped = run_cases(at, 1, {"moved": [{**run, "stop_after": 2}]}, PATIENCE, device=first, fresh=True)["moved"]
        goes_on = run_cases(at, 1, {"moved": [run]}, PATIENCE, device=second, fresh=True)["moved"]
        found["CPU" if second == "cpu" else "GPU"] = (stopped["errors"][0], goes_on)
    return found


@pytest.mark.gpu_path("checkpoints between CPU and GPU")
@pytest.mark.gpu_world("moved")
@pytest.mark.parametrize("to", ["GPU", "CPU"])
def test_a_job_stopped_on_one_kind_of_device_goes_on_on_the_other(world, to):
    if to not in world:
        pytest.skip("there is one kind of device")
    log, found = world[to]
    assert "stopped after step 2, its checkpoint is written" in log
    require_equal(world[""], found, tolerance=1e-9)
