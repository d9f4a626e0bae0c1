"""Updates in one kernel: what a layout trains to is the same as with a loop for each operation.

What ranks hold parts of is where torch lacks such a kernel, or takes no mixture (optimizers.py).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.suites import GATE
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.layouts import PIPELINE, REPLICATE, SHARD, TENSOR
from tests.unit.trainer.worlds import run_cases, small, user

EXPERT = "expertParallelDegree"
OPTIMIZERS = {
    "SGD": {"name": "SGD", "learningRate": 0.1},
    "SGD, momentum": {"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "nesterov": True, "weightDecay": 0.1},
    "Adam": {"name": "Adam", "learningRate": 0.01, "weightDecay": 0.1},
    "AdamW": {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1},
    "AdamW of matrices": {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1, "weightDecayOn": "Matrices"},
}
COMMON = small(steps=2, data=user("double_tokens"), maxGradientNorm=0.3)
UNBOUNDED = small(steps=2, data=user("double_tokens"))
GPT = {**COMMON, "model": user("double_gpt")}
EXPERTS = {**COMMON, "model": user("double_moe_gpt")}
FP16 = {**COMMON, "model": user("double_gpt", double=False), "precision": "FP16"}


def table(function: str) -> dict[str, Any]:
    """A model with sparse gradients."""
    code = "tests.unit.trainer.table_code"
    return small(steps=2, model={"entrypoint": f"{code}:{function}"}, data={"entrypoint": f"{code}:row_samples"})


# ranks, training, parallelism
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "replicas": (2, GPT, {}),
    "shards": (2, GPT, {SHARD: 2}),
    "tensor": (2, GPT, {TENSOR: 2}),
    "pipeline": (2, GPT, {PIPELINE: 2}),
    "experts of one process": (2, EXPERTS, {}),
    "experts": (2, EXPERTS, {SHARD: 2, EXPERT: 2}),
    "experts of tensor groups": (2, EXPERTS, {TENSOR: 2, EXPERT: 2}),
    "replicas, FP16": (2, FP16, {}),
    "shards, FP16": (2, FP16, {SHARD: 2}),
    "tensor, FP16": (2, FP16, {TENSOR: 2}),
    "versions of weights": (
        2,
        {**UNBOUNDED, "model": user("double_gpt", tieWeights=False)},
        {PIPELINE: 2, "pipeline": {"schedule": "PipeDream2BW", "microbatches": 2}},
    ),
    "averages": (2, GPT, {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 2}}}),
    "shards, resumed": (2, GPT, {SHARD: 2}),
    "tensor, resumed": (2, GPT, {TENSOR: 2}),
    "sparse": (2, table("tabled"), {}),
    "sparse of no module": (1, table("hidden"), {}),
    "replicas of shards": (4, GPT, {REPLICATE: 2, SHARD: 2}),
    "shards of tensor groups": (4, GPT, {SHARD: 2, TENSOR: 2}),
    "shards of experts": (4, EXPERTS, {SHARD: 4, EXPERT: 2}),
}
WHOLE = {"replicas", "pipeline", "experts of one process", "replicas, FP16", "versions of weights", "averages"}
"""Layouts whose ranks hold whole parameters alone."""
MIXED = {"tensor", "tensor, FP16", "tensor, resumed"}
"""Those whose ranks hold whole parameters beside parts."""
RESUMED = {"shards, resumed", "tensor, resumed"}
EVERY = {"replicas", "shards", "tensor"}
"""Those with every optimizer, in the complete suite; the others have one of each kind."""
TWO = ("SGD", "AdamW of matrices")
SPARSE = {"sparse", "sparse of no module"}
"""Those of which plain SGD alone takes the gradients, one by one."""


COMPLETE = {
    *("replicas, FP16", "shards, FP16", "tensor, FP16"),
    *("averages", "experts of one process", "experts of tensor groups", "tensor, resumed"),
}
"""Those that the gate leaves out: what is theirs is in others, too."""


def runs(layout: str, optimizer: str) -> bool:
    if layout in SPARSE:
        return optimizer == "SGD"
    if GATE:
        return layout not in COMPLETE and optimizer in TWO
    return layout in EVERY or optimizer in TWO


NAMES = {
    f"{layout}, {optimizer}, {ranks} ranks": (ranks, layout, optimizer)
    for layout, (ranks, *_) in LAYOUTS.items()
    for optimizer in OPTIMIZERS
    if runs(layout, optimizer)
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked_for: Any) -> Callable[[int], dict[bool, dict[str, Any]]]:
    """Results of the cases with a number of ranks, by whether there may be such kernels."""

    @cache
    def run(ranks: int) -> dict[bool, dict[str, Any]]:
        cases = {}
        for name in sorted(asked_for("test_fused", "name")):
            size, layout, optimizer = NAMES[name]
            if size == ranks:
                _, training, parallelism = LAYOUTS[layout]
                job = {"training": {**training, "optimizer": OPTIMIZERS[optimizer]}, "parallelism": parallelism}
                cases[name] = [*([job | {"stop_after": 1}] if layout in RESUMED else []), job]
        single = run_cases(tmp_path_factory.mktemp("single"), ranks, cases, SINGLE_LOOPS="1")
        return {True: run_cases(tmp_path_factory.mktemp("fused"), ranks, cases), False: single}

    return run


@pytest.mark.parametrize("name", NAMES)
def test_one_kernel_updates_and_trains_to_the_same(
    results: Callable[[int], dict[bool, dict[str, Any]]], name: str
) -> None:
    ranks, layout, optimizer = NAMES[name]
    found, expected = (results(ranks)[fused][name] for fused in (True, False))
    assert found["errors"][-1] is expected["errors"][-1] is None
    require_same(found["parameters"], expected["parameters"], 1e-4 if "FP16" in layout else 1e-9)
    of_sgd = layout in WHOLE and optimizer == "SGD"
    fused = of_sgd if optimizer.startswith("SGD") else layout not in MIXED
    assert set(found["fused"]) == {fused}
    assert set(expected["fused"]) == {False}
