"""The latest checkpoints stay, and the best by held-out figures, also those from before a restart."""

import pytest

from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint.retention import kept
from disttrain_trainer.checkpoint.step_manifest import read_manifest
from disttrain_trainer.checkpoint.storage import StepFolders
from tests.unit.trainer.worlds import run_cases, small, user

FIGURES = {10: 0.5, 20: 0.2, 30: 0.4, 40: None, 50: 0.2, 60: 0.9}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"keep_latest": 2}, {50, 60}),
        ({"keep_latest": 10}, {10, 20, 30, 40, 50, 60}),
        ({"keep_latest": 1, "keep_best": 1}, {20, 60}),
        ({"keep_latest": 1, "keep_best": 2}, {20, 50, 60}),
        ({"keep_latest": 2, "keep_best": 2}, {20, 50, 60}),
        ({"keep_latest": 1, "keep_best": 3, "best_metric": "Accuracy"}, {10, 30, 60}),
        ({"keep_latest": 1, "keep_best": 3, "best_metric": "f1", "best_mode": "Max"}, {10, 30, 60}),
        ({"keep_latest": 1, "keep_best": 1, "best_metric": "cost", "best_mode": "Min"}, {20, 60}),
        ({"keep_latest": 1, "keep_best": 1, "best_metric": "accuracy", "best_mode": "Min"}, {20, 60}),
        ({"keep_latest": 3, "keep_best": 9}, {10, 20, 30, 40, 50, 60}),
    ],
)
def test_what_is_kept(settings, steps):
    assert kept(FIGURES, Checkpoint(**settings)) == steps


# Steps so large that the held-out loss goes up and down.
JUMPY = small(
    steps=12, optimizer={"name": "SGD", "learningRate": 6.0}, evaluation={"interval": 1}, logging={"interval": 1}
)
OWN = {name: value for name, value in JUMPY.items() if name not in ("model", "data")} | {
    "task": {"entrypoint": "tests.unit.trainer.task_code:JudgedByItsOwn"}
}
BEST = {"interval": 2, "keepLatest": 1, "keepBest": 2}


class TestRuns:
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        return tmp_path_factory.mktemp("best")

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls, folder):
        def runs(**settings):
            training = {**JUMPY, "checkpoint": {**BEST, **settings}}
            return [{"training": training, "stop_after": 7}, {"training": training}]

        cases = {
            "Loss": runs(),
            "Accuracy": runs(bestMetric="Accuracy"),
            "right": [{"training": {**OWN, "checkpoint": {**BEST, "bestMetric": "right", "bestMode": "Max"}}}],
            "no such figure": [{"training": {**OWN, "checkpoint": {**BEST, "bestMetric": "left", "bestMode": "Max"}}}],
            "nothing held out": [{"training": {**JUMPY, "data": user("float_samples"), "checkpoint": BEST}}],
            "no classes": [
                {
                    "training": {
                        **JUMPY,
                        "data": user("double_targets"),
                        "loss": {"name": "MeanSquaredError"},
                        "checkpoint": {**BEST, "bestMetric": "Accuracy"},
                    }
                }
            ],
        }
        return run_cases(folder, 2, cases)

    @pytest.mark.parametrize(("metric", "key", "sign"), [("Loss", "global_avg_loss", 1), ("Accuracy", "accuracy", -1)])
    def test_the_best_of_both_attempts_stay(self, folder, results, metric, key, sign):
        figures = {
            line["step"]: line[f"validation_metrics/{key}"]
            for line in results[metric]["metrics"]
            if f"validation_metrics/{key}" in line
        }
        # Step 7 was saved when the first attempt was stopped, and has been judged at its end.
        judged = sorted((sign * figures[step], step) for step in range(2, 13, 2))
        best = {step for _, step in judged[:2]}
        assert min(best) <= 6, "the case is of no use unless a checkpoint of the first attempt is among the best"
        folders = StepFolders(folder / metric / "test")
        assert folders.complete() == sorted({12} | best)
        for step in folders.complete():
            assert read_manifest(folders.path(step)).figures[metric.lower()] == figures[step]

    def test_the_best_by_a_figure_of_ones_own_stay(self, folder, results):
        name = "validation_metrics/right"
        figures = {line["step"]: line[name] for line in results["right"]["metrics"] if name in line}
        judged = sorted((-figures[step], step) for step in range(2, 13, 2))
        assert results["right"]["errors"] == [None]
        assert StepFolders(folder / "right" / "test").complete() == sorted({12} | {step for _, step in judged[:2]})

    def test_what_cannot_be_judged_is_refused(self, results):
        assert "the data has none" in results["nothing held out"]["errors"][0]
        assert "figure of classes" in results["no classes"]["errors"][0]
        assert (
            "left is no figure of the evaluation, which has `loss`, `right`" in results["no such figure"]["errors"][0]
        )
