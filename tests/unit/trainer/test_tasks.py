"""Tasks of one's own: trained in every layout that takes them as in one process, and refused by name where wrong."""

from pathlib import Path
from typing import Any

import pytest

from disttrain_api.manifest import load
from tests.unit.trainer.comparisons import ACCURACY, HELD_OUT_LOSS, LOSS, require_same, require_same_figures, series
from tests.unit.trainer.layouts import SHARD, TENSOR
from tests.unit.trainer.worlds import ROOT, run_cases, small


def with_task(task: str, config: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`small` with a task of task_code.py."""
    entrypoint = {"entrypoint": f"tests.unit.trainer.task_code:{task}", "config": config or {}}
    training = small(task=entrypoint, logging={"interval": 1}, evaluation={"interval": 3}, **changes)
    del training["model"], training["data"]
    return training


def own(function: str, **settings: Any) -> dict[str, Any]:
    return {"entrypoint": f"tests.unit.trainer.task_code:{function}", **settings}


BUILT_IN = small(logging={"interval": 1}, evaluation={"interval": 3})
PLANNED = {"plan": True}
FIRST = {"learningRateFactor": 0}
RATES = {"learningRate": 0.1, "groups": [{**FIRST, "pattern": "4.*"}]}
STILL = {"name": "SGD", "momentum": 0.9, **RATES}
# ranks, training, parallelism, the case that trains the same in one process
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str | None]] = {
    "built in": (1, BUILT_IN, {}, None),
    "one step": (1, {**BUILT_IN, "optimizer": STILL, "steps": 1}, {}, None),
    "alone": (1, with_task("Classify"), {}, "built in"),
    "twins": (1, with_task("Twins"), {}, None),
    "planned": (1, with_task("Twins", PLANNED), {}, None),
    "grouped": (1, {**BUILT_IN, "optimizer": STILL}, {}, None),
    "an optimizer of its own, fsdp2": (2, with_task("Optimized", optimizer={}), {SHARD: 2}, "grouped"),
    "one by entry point, fsdp2": (2, {**BUILT_IN, "optimizer": own("momentum", **RATES)}, {SHARD: 2}, "grouped"),
    "dp2": (2, with_task("Classify"), {}, "built in"),
    "dp2, accumulated": (2, with_task("Twins", gradientAccumulationSteps=4), {}, "twins"),
    "dp2, static graph": (2, with_task("Twins"), {"dataParallel": {"staticGraph": True}}, "twins"),
    "fsdp2": (2, with_task("Twins"), {SHARD: 2}, "twins"),
    "tp2": (2, with_task("Twins", PLANNED), {TENSOR: 2}, "planned"),
}
REFUSED = {
    "incomplete": "`training.task.entrypoint`: tests.unit.trainer.task_code:Wrong returned a Wrong without data()",
    "tensor": "Wrong.loss(model, batch) returned a tensor of shape [], expected disttrain_trainer.protocols.Loss(",
    "mean for each": "returned a Loss whose sum is a tensor of shape [12, 5], expected one number in a tensor",
    "detached": "Wrong.loss(model, batch) returned a Loss whose sum has no gradient",
    "figure": "Wrong.loss returned a float as `right`, expected protocols.Mean(sum, weight)",
    "name": r"Wrong.loss returned a figure named 'right\n', expected letters",
    "weight": "Wrong.weight(batch) returned 'many', expected a number from 0 on",
    "shapes": "`training.task`: part ['x'] of sample",
    "types": " is a object: batches are made of tensors, numbers and text",
}


def example(name: str) -> dict[str, Any]:
    training = load(ROOT / "examples" / "tasks" / f"{name}.yaml").spec.training
    described: dict[str, Any] = training.model_dump(mode="json", by_alias=True, exclude_none=True)
    return described


EXAMPLES = sorted(path.stem for path in (ROOT / "examples" / "tasks").glob("*.yaml"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked_for: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for world in (1, 2):
        cases = {
            name: [{"training": training, "parallelism": parallelism}]
            for name, (ranks, training, parallelism, _) in CASES.items()
            if ranks == world
        }
        if world == 2:
            cases["resumed"] = [
                {"training": with_task("Classify"), "stop_after": 2},
                {"training": with_task("Classify")},
            ]
            cases |= {how: [{"training": with_task("Wrong", {"how": how})}] for how in REFUSED}
            cases["forgetful"] = [{"training": with_task("Optimized", {"forgets": "0.bias"}, optimizer={})}]
            cases["forgetful function"] = [{"training": small(optimizer=own("forgetful"))}]
            cases["no optimizer"] = [{"training": small(optimizer=own("no_optimizer"))}]
            cases["not so"] = [{"training": small(optimizer={"entrypoint": "torch.optim:LBFGS"})}]
            cases["not these"] = [{"training": small(optimizer={"entrypoint": "torch.optim:Muon"})}]
            cases["no factor"] = [{"training": small(lrSchedule=own("slow"))}]
            cases["two optimizers"] = [{"training": with_task("Optimized")}]
            cases["no such parameter"] = [{"training": small(optimizer={"groups": [{**FIRST, "pattern": "head.*"}]})}]
            cases |= {name: [{"training": example(name)}] for name in sorted(asked_for("test_tasks", "learned"))}
        found |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, cases)
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_a_task_trains_what_it_trains_in_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found, expected = results[name], results[str(CASES[name][3])]
    assert found["errors"] == [None]
    require_same(found["parameters"], expected["parameters"])
    require_same_figures(found, expected, (LOSS, "grad_norm"), steps=6)
    require_same_figures(found, expected, [HELD_OUT_LOSS])
    assert len(series(found, HELD_OUT_LOSS)) == 2


@pytest.mark.parametrize(("name", "reference"), [("dp2", "alone"), ("dp2, accumulated", "twins"), ("tp2", "planned")])
def test_figures_are_those_of_all_samples(results: dict[str, dict[str, Any]], name: str, reference: str) -> None:
    keys = {key for line in results[reference]["metrics"] for key in line if key.startswith(("task/", "validation"))}
    assert keys > {HELD_OUT_LOSS}
    require_same_figures(results[name], results[reference], keys)
    assert any(key.startswith("task/") for key in keys)


def test_accuracy_is_that_of_the_built_in_task(results: dict[str, dict[str, Any]]) -> None:
    assert series(results["dp2"], ACCURACY) == series(results["built in"], ACCURACY)


def test_a_task_that_was_stopped_goes_on_to_the_last_bit(results: dict[str, dict[str, Any]]) -> None:
    assert results["resumed"]["errors"][1] is None
    require_same(results["resumed"]["parameters"], results["dp2"]["parameters"], 0.0)


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_no_task_is_refused_by_name(results: dict[str, dict[str, Any]], how: str) -> None:
    (error,) = results[how]["errors"]
    assert error.startswith("InvalidConfiguration: ")
    assert REFUSED[how] in error


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "forgetful",
            "Optimized.optimizer(parameters) returned one without 0.bias, expected one of all the parameters",
        ),
        ("forgetful function", "task_code:forgetful returned one without 0.weight, expected one of all the parameters"),
        ("no optimizer", "task_code:no_optimizer returned a dict, expected a torch.optim.Optimizer"),
        ("not so", "torch.optim:LBFGS does not take (params, lr, weight_decay): got an unexpected keyword argument"),
        ("not these", "`training.optimizer.entrypoint`: torch.optim:Muon: Muon only supports 2D parameters"),
        ("no factor", "task_code:slow returned -1.0 for step 0 of 6, expected a number from 0 on"),
        ("two optimizers", "`training.optimizer`: Optimized has a method `optimizer`: remove one of the two"),
        ("no such parameter", "no parameter matches the pattern 'head.*'; the model has 0.weight, 0.bias,"),
    ],
)
def test_parameters_that_no_optimizer_or_group_would_get_are_named(results, case, message):
    (error,) = results[case]["errors"]
    assert message in error


def test_a_group_whose_factor_is_0_stands_still(results: dict[str, dict[str, Any]]) -> None:
    moved, still = results["built in"]["parameters"], results["grouped"]["parameters"]
    assert {name for name in moved if not moved[name].equal(still[name])} == set(moved)
    first = results["one step"]["parameters"]
    assert {name for name in first if first[name].equal(still[name])} == {"4.weight", "4.bias"}


LEARNED = {
    "callbacks": ("accuracy", 0.9, 1.0),
    "contrastive": ("right", 0.6, 1.0),
    "distillation": ("accuracy", 0.8, 1.0),
    "dpo": ("accuracy", 0.9, 1.0),
    "masked": ("restored", 0.8, 1.0),
    "stream": ("right", 0.3, 1.0),
}


@pytest.mark.parametrize("learned", EXAMPLES)
def test_an_example_learns(results: dict[str, dict[str, Any]], learned: str) -> None:
    assert results[learned]["errors"] == [None]
    figure, least, most = LEARNED[learned]
    assert least <= series(results[learned], f"validation_metrics/{figure}")[-1] <= most
    assert Path(ROOT, "examples", "tasks", f"{learned}.py").exists()
