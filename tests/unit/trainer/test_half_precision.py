"""BF16 and FP16 compute in each layout what they compute with replicas, and parameters stay whole numbers of FP32."""

import pytest
import torch

from tests.unit.trainer.worlds import run_cases, small, user

LAYOUTS = {
    "dp": {},
    "fsdp": {"dataParallelShardDegree": 2},
    "tp": {"tensorParallelDegree": 2, "vocabularyParallel": True},
    "pp": {"pipelineParallelDegree": 2},
    "ep": {"dataParallelShardDegree": 2, "expertParallelDegree": 2},
}
FORMATS = {"BF16": 2**-7, "FP16": 2**-10}
"""How far a loss may be off, for each: half of what a number of that format may be."""
OFFLOADED = {"offload": {"parameters": True}}


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
        cases[f"{precision} dp, experts"] = (training(precision, experts=4), {})
        cases[f"{precision} fsdp, offloaded"] = (training(precision) | OFFLOADED, LAYOUTS["fsdp"])
    cases["lopsided fsdp"] = (LOPSIDED, LAYOUTS["fsdp"])
    cases["lopsided pp"] = (LOPSIDED, LAYOUTS["pp"] | {"pipeline": {"schedule": "GPipe", "microbatches": 1}})
    runs = {name: [{"training": given, "parallelism": parallelism}] for name, (given, parallelism) in cases.items()}
    # What overflows is restored with a scale that has fallen.
    (run,) = runs["lopsided pp"]
    runs["lopsided pp, resumed"] = [{**run, "stop_after": 12}, run]
    alone = run_cases(tmp_path_factory.mktemp("alone"), 1, {"lopsided": [{"training": LOPSIDED}]})
    return alone | run_cases(tmp_path_factory.mktemp("halves"), 2, runs)


def losses(result):
    return [line["loss_metrics/global_avg_loss"] for line in result["metrics"] if "lr" in line]


@pytest.mark.parametrize("layout", ["fsdp", "fsdp, offloaded", "tp", "pp", "ep"])
@pytest.mark.parametrize("precision", FORMATS)
def test_layouts_compute_alike_and_keep_whole_parameters(results, precision, layout):
    found, expected = results[f"{precision} {layout}"], results[f"{precision} dp{', experts' * (layout == 'ep')}"]
    assert found["errors"] == [None]
    assert {value.dtype for value in found["parameters"].values()} == {torch.float32}
    assert losses(found) == pytest.approx(losses(expected), rel=FORMATS[precision])


@pytest.mark.parametrize(("layout", "near"), [("fsdp", 0.2), ("pp", 1e-3), ("pp, resumed", 1e-3)])
def test_all_parts_skip_a_step_in_which_one_overflows(results, layout, near):
    """The first layer's gradients overflow until the scale has fallen; the second layer's never do."""
    expected, found = results["lopsided"], results[f"lopsided {layout}"]
    assert found["errors"][-1] is None
    # It starts at 2^16.
    assert expected["scale"] <= 2**10
    # Smaller parts of a batch have smaller gradients.
    assert found["scale"] in (expected["scale"], *[2 * expected["scale"]] * (layout == "fsdp"))
    assert losses(found) == pytest.approx(losses(expected), rel=near)
    assert losses(expected)[5] == losses(expected)[0]
    assert losses(expected)[-1] < 0.9 * losses(expected)[0]
