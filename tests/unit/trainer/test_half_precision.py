"""BF16 and FP16 compute in each layout what they compute with replicas, and parameters stay whole numbers of FP32."""

import pytest
import torch

from tests.unit.trainer.comparisons import require_same_gradients, series
from tests.unit.trainer.worlds import run_cases, small, user

LAYOUTS = {
    "dp": {},
    "fsdp": {"dataParallelShardDegree": 2},
    "cp": {"contextParallelDegree": 2, "contextParallelMethod": "Ring"},
    "tp": {"tensorParallelDegree": 2, "vocabularyParallel": True},
    "pp": {"pipelineParallelDegree": 2},
    "ep": {"dataParallelShardDegree": 2, "expertParallelDegree": 2},
}
FORMATS = {"BF16": 2**-7, "FP16": 2**-10}
"""How far a loss may be off, for each: half of what a number of that format may be."""
IN_CHUNKS = {"loss": {"chunks": 5}}
OFFLOADED = {"offload": {"parameters": True}}


IN_TWO_PARTS = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules whose backward pass comes in two parts."""
MANY = 16
"""Microbatches: enough that sums in halves would show."""


def in_pipeline(schedule):
    return {**LAYOUTS["pp"], "pipeline": {"schedule": schedule, "microbatches": MANY}}


def training(precision, **config):
    gpt = user("double_gpt", double=False, tieWeights=False, **config)
    data = user("double_tokens")
    return small(model=gpt, data=data, steps=3, precision=precision, logging={"interval": 1})


LOPSIDED = small(
    model=user("lopsided"),
    data=user("float_samples"),
    optimizer={"name": "AdamW", "learningRate": 1e-4},
    steps=30,
    globalBatchSize=50,
    precision="FP16",
    logging={"interval": 1},
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cases = {}
    for precision in FORMATS:
        for layout, parallelism in LAYOUTS.items():
            config = {"experts": 4} if layout == "ep" else {}
            cases[f"{precision} {layout}"] = (training(precision, **config), parallelism)
            cases[f"{precision} {layout}, chunks"] = (training(precision, **config) | IN_CHUNKS, parallelism)
        cases[f"{precision} dp, experts"] = (training(precision, experts=4), {})
        cases[f"{precision} fsdp, offloaded"] = (training(precision) | OFFLOADED, LAYOUTS["fsdp"])
        for schedule in ("Interleaved1F1B", *IN_TWO_PARTS):
            large = {"globalBatchSize": 2 * MANY}
            cases[f"{precision} {schedule}"] = (training(precision) | OFFLOADED | large, in_pipeline(schedule))
    cases["lopsided fsdp"] = (LOPSIDED, LAYOUTS["fsdp"])
    cases["lopsided pp"] = (LOPSIDED, LAYOUTS["pp"] | {"pipeline": {"schedule": "GPipe", "microbatches": 1}})
    runs = {name: [{"training": given, "parallelism": parallelism}] for name, (given, parallelism) in cases.items()}
    # What overflows is restored with a scale that has fallen.
    (run,) = runs["lopsided pp"]
    runs["lopsided pp, resumed"] = [{**run, "stop_after": 12}, run]
    alone = run_cases(tmp_path_factory.mktemp("alone"), 1, {"lopsided": [{"training": LOPSIDED}]})
    return alone | run_cases(tmp_path_factory.mktemp("halves"), 2, runs)


@pytest.mark.parametrize(
    "layout", ["fsdp", "fsdp, offloaded", "cp", "tp", "pp", "ep", *(f"{layout}, chunks" for layout in LAYOUTS)]
)
@pytest.mark.parametrize("precision", FORMATS)
def test_layouts_compute_alike_and_keep_whole_parameters(results, precision, layout):
    found, expected = (
        results[f"{precision} {layout}"],
        results[f"{precision} dp{', experts' * layout.startswith('ep')}"],
    )
    assert found["errors"] == [None]
    assert {value.dtype for value in found["parameters"].values()} == {torch.float32}
    assert series(found) == pytest.approx(series(expected), rel=FORMATS[precision])


@pytest.mark.parametrize("schedule", IN_TWO_PARTS)
@pytest.mark.parametrize("precision", FORMATS)
def test_gradients_that_come_apart_are_summed_in_whole_numbers(results, precision, schedule):
    found, expected = results[f"{precision} {schedule}"], results[f"{precision} Interleaved1F1B"]
    assert found["errors"] == expected["errors"] == [None]
    # The last bits of sums in halves would be off by 2^-9 and more.
    require_same_gradients(found["gradients"], expected["gradients"], 1e-5)
    assert series(found) == pytest.approx(series(expected), rel=1e-5)


@pytest.mark.parametrize(("layout", "near"), [("fsdp", 0.2), ("pp", 1e-3), ("pp, resumed", 1e-3)])
def test_all_parts_skip_a_step_in_which_one_overflows(results, layout, near):
    """The first layer's gradients overflow until the scale has fallen; the second layer's never do."""
    expected, found = results["lopsided"], results[f"lopsided {layout}"]
    assert found["errors"][-1] is None
    # It starts at 2^16.
    assert expected["scale"] <= 2**10
    # Smaller parts of a batch have smaller gradients.
    assert found["scale"] in (expected["scale"], *[2 * expected["scale"]] * (layout == "fsdp"))
    assert series(found) == pytest.approx(series(expected), rel=near)
    assert series(expected)[5] == series(expected)[0]
    assert series(expected)[-1] < 0.9 * series(expected)[0]
