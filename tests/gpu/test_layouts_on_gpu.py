"""Every layout of two ranks, on one GPU, computes what one process computes there: float64, to 1e-10.

NCCL takes one rank per GPU, so these ranks talk through gloo (device.py): what is held here is the computing, the
copies to and from the host, and gloo's collectives of tensors on GPUs.
"""

import pytest
import torch

from tests.unit.trainer import test_moe as moe
from tests.unit.trainer.layouts import ALL_LAYOUTS as LAYOUTS
from tests.unit.trainer.layouts import TRAININGS
from tests.unit.trainer.test_gradient_sums import DOUBLE, LOSSY, SENDS_ALL, WIDE
from tests.unit.trainer.worlds import require_same, run_cases

TOLERANCE = 1e-10
KEYS = ("loss_metrics/global_avg_loss", "grad_norm")
PATHS = {
    "dp": "gloo on GPUs",
    "fsdp": "shards (FSDP2)",
    "tp": "tensor parallelism",
    "pp": "pipeline",
    "there and back": "pipeline, there and back",
    "one": "several devices of a process",
}


def starting_with(prefix):
    """Layouts of one and two ranks whose name begins so; a world for each prefix, so that none can end another's."""
    return [name for name, (ranks, *_) in LAYOUTS.items() if ranks <= 2 and prefix_of(name).startswith(prefix)]


def prefix_of(name):
    """The name; but stages that a rank sends to itself have failed with gloo of torch 2.11, and get their own world."""
    return "there and back" if "ZBV" in name or "DualPipeV" in name else name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = {name: [{"training": training}] for name, training in TRAININGS.items()}
    cases |= {f"experts, {name}": [{"training": training}] for name, training in moe.TRAININGS.items()}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases, device="cuda")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Results of the layouts whose name begins with a prefix; run when they are first asked for."""
    found = {}

    def run(prefix):
        names = starting_with(prefix)
        for ranks in {LAYOUTS[name][0] for name in names} - {world for at, world in found if at == prefix}:
            cases = {
                name: [{"training": {**TRAININGS[training], **changes}, "parallelism": parallelism}]
                for name, (world, training, parallelism, changes) in LAYOUTS.items()
                if name in names and world == ranks
            }
            # Before it runs: a world that fails is not started again for each of its layouts.
            found[prefix, ranks] = {}
            found[prefix, ranks] = run_cases(tmp_path_factory.mktemp(prefix), ranks, cases, device="cuda")
        return {name: result for (at, _), results in found.items() if at == prefix for name, result in results.items()}

    return run


def require_equal(expected, found, tolerance=TOLERANCE):
    assert found["errors"] == [None]
    require_same(found["parameters"], expected["parameters"], tolerance)
    for key in KEYS:
        values = [[line[key] for line in result["metrics"] if key in line] for result in (expected, found)]
        assert values[0]
        assert values[1] == pytest.approx(values[0], rel=tolerance, abs=1e-14)


@pytest.mark.parametrize(
    ("prefix", "layout"),
    [
        pytest.param(prefix, name, id=name, marks=pytest.mark.gpu_path(path))
        for prefix, path in PATHS.items()
        for name in starting_with(prefix)
    ],
)
def test_a_layout_equals_one_process(alone, together, prefix, layout):
    require_equal(alone[LAYOUTS[layout][1]], together(prefix)[layout])


@pytest.mark.gpu_path("offload")
@pytest.mark.parametrize("layout", ["fsdp2, offloaded", "dp2, offloaded"])
def test_offloaded_parameters_lie_in_pinned_memory(alone, together, layout):
    prefix = layout[:2] if layout.startswith("dp") else "fsdp"
    assert together(prefix)[layout]["held"] == {"pinned"}
    assert alone[LAYOUTS[layout][1]]["held"] == {"cuda"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    cases = {
        name: [{"training": moe.TRAININGS[training] | changes, "parallelism": parallelism}]
        for name, (ranks, training, parallelism, changes) in moe.ALL_LAYOUTS.items()
        if ranks == 2
    }
    for name in FORMATS:
        _, training, parallelism = moe.OTHERS[name]
        cases[name] = [{"training": training, "parallelism": parallelism}]
    return run_cases(tmp_path_factory.mktemp("experts"), 2, cases, device="cuda")


@pytest.mark.gpu_path("expert parallelism")
@pytest.mark.parametrize("layout", [name for name, (ranks, *_) in moe.ALL_LAYOUTS.items() if ranks == 2])
def test_experts_equal_one_process(alone, experts, layout):
    require_equal(alone[f"experts, {moe.ALL_LAYOUTS[layout][1]}"], experts[layout])


FORMATS = ("FP32, dp2", "FP32, fsdp2 + ep2", "FP16, dp2", "BF16, dp2", "BF16, fsdp2 + ep2")


@pytest.mark.gpu_path("expert parallelism")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_other_formats_follow_fp32(experts, name):
    for key in KEYS:
        expected, found = (
            [line[key] for line in experts[case]["metrics"] if key in line] for case in (FORMATS[0], name)
        )
        assert found == pytest.approx(expected, rel=1e-4 if name.startswith("FP32") else 0.05)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    cases = {"plain": [{"training": DOUBLE}], "plain, wide": [{"training": WIDE}]}
    cases |= {name: [{"training": DOUBLE, "parallelism": parallelism}] for name, parallelism in SENDS_ALL.items()}
    for name, at in LOSSY.items():
        run = {"training": WIDE, "parallelism": at}
        cases |= {f"lossy {name}": [run], f"resumed {name}": [{**run, "stop_after": 3}, run]}
    return run_cases(tmp_path_factory.mktemp("sums"), 2, cases, device="cuda")


@pytest.mark.gpu_path("all-reduces and compression hooks")
@pytest.mark.parametrize("name", SENDS_ALL)
def test_where_everything_is_sent_it_is_plain_ddp(sums, name):
    require_equal(sums["plain"], sums[name])


@pytest.mark.gpu_path("all-reduces and compression hooks")
@pytest.mark.parametrize("name", LOSSY)
def test_compressed_gradients_differ_and_still_learn(sums, name):
    plain, found = sums["plain, wide"], sums[f"lossy {name}"]
    assert found["errors"] == [None]
    assert any(not torch.equal(found["parameters"][key], value) for key, value in plain["parameters"].items())
    losses = [line["loss_metrics/global_avg_loss"] for line in found["metrics"] if "lr" in line]
    assert losses[-1] < losses[0]


@pytest.mark.gpu_path("all-reduces and compression hooks")
@pytest.mark.parametrize("name", LOSSY)
def test_what_is_kept_of_gradients_is_restored(sums, name):
    through, resumed = sums[f"lossy {name}"], sums[f"resumed {name}"]
    assert resumed["errors"][1] is None
    for parameter, value in through["parameters"].items():
        torch.testing.assert_close(resumed["parameters"][parameter], value, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu_path("checkpoints between CPU and GPU")
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_job_stopped_on_one_kind_of_device_goes_on_on_the_other(alone, tmp_path, first, second):
    run = {"training": TRAININGS["gpt, AdamW"]}
    stopped = run_cases(tmp_path, 1, {"moved": [{**run, "stop_after": 2}]}, device=first)["moved"]
    assert "stopped after step 2, its checkpoint is written" in stopped["errors"][0]
    require_equal(alone["gpt, AdamW"], run_cases(tmp_path, 1, {"moved": [run]}, device=second)["moved"], tolerance=1e-9)


def test_training_moves_the_parameters(alone):
    """So that equality above is not that of standing still."""
    for name, result in alone.items():
        losses = [line["loss_metrics/global_avg_loss"] for line in result["metrics"] if "lr" in line]
        assert losses[-1] != pytest.approx(losses[0], rel=1e-3), name
