"""An evaluation that fails costs its figures: no step, no checkpoint, and the job only where its manifest asks."""

import json
import signal

import pytest

from disttrain_api.names import ExitCode
from disttrain_trainer.between_steps import completing
from disttrain_trainer.checkpoint.step_manifest import read_manifest
from disttrain_trainer.checkpoint.storage import StepFolders
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.runtime.errors import EvaluationAborted, NonFiniteLoss
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.server_jobs import a_job, ended
from tests.unit.trainer.worlds import job, launch, run_cases, run_ranks, small, user

STEPS = 6


def training(how, *, rank=0, folder="", on_failure=None, **changes):
    data = {
        "entrypoint": "tests.unit.trainer.ending_code:held_out_samples",
        "config": {"how": how, "rank": rank, "folder": str(folder)},
    }
    evaluation = {"interval": 2, "batchSize": 2, **({"onFailure": on_failure} if on_failure else {})}
    return small(
        **{
            "steps": STEPS,
            "data": data,
            "evaluation": evaluation,
            "checkpoint": {"interval": 2, "keepLatest": 10},
            "logging": {"interval": 1},
            **changes,
        }
    )


def figures_of(storage):
    """Figures of each complete checkpoint, by its step."""
    folders = StepFolders(storage / "test")
    return {step: read_manifest(folders.path(step)).figures for step in folders.complete()}


LAYOUTS = {"replicas": {}, "Local SGD": {"dataParallel": {"mode": "LocalSGD"}}}


class TestWarn:
    @pytest.fixture(scope="class")
    @classmethod
    def results(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("warn")
        runs = {
            name: [{"training": training(how, rank=1), "parallelism": LAYOUTS[layout]}]
            for layout in LAYOUTS
            for name, how in {layout: "raise", f"{layout}, no failure": "none"}.items()
        }
        for how in ("none", "draw"):
            # With dropout, for which the model draws, too.
            runs[how] = [{"training": training(how, rank=1, model=user("wide_mlp"))}]
        results = run_cases(folder, 2, runs)
        return {name: (result, folder / name) for name, result in results.items()}

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_training_is_the_same_as_without_a_failure(self, results, layout):
        failing, _ = results[layout]
        sound, _ = results[f"{layout}, no failure"]
        assert failing["errors"] == [None]
        require_same(failing["parameters"], sound["parameters"], 0.0)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_checkpoint_is_there_and_only_the_figures_are_missing(self, results, layout):
        _, failing = results[layout]
        _, sound = results[f"{layout}, no failure"]
        assert figures_of(failing) == {2: {}, 4: {}, 6: {}}
        assert all(figures["loss"] > 0 for figures in figures_of(sound).values())

    def test_what_held_out_data_draw_does_not_change_the_training(self, results):
        require_same(results["draw"][0]["parameters"], results["none"][0]["parameters"], 0.0)


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_failing_evaluation_is_reported_and_the_job_is_done(tmp_path, how):
    ranks = run_ranks(tmp_path, job(training(how, rank=1)), 2, storage=tmp_path / "storage")
    assert [rank.code for rank in ranks] == [0, 0], ranks[1].err
    kind = {"raise": "ValueError", "exit": "SystemExit"}[how]
    sentence = f"the evaluation after step 6 failed on rank 1: {kind}"
    for rank in ranks:
        assert rank.report.done
        assert rank.report.evaluation_failure == sentence
        assert rank.report.metrics == {}
    assert sentence in ranks[0].out
    assert "ending_code.py" in ranks[1].err, "its traceback is in the log"


def test_without_storage_a_failing_evaluation_does_not_end_the_job(tmp_path):
    (rank,) = run_ranks(tmp_path, job(training("raise")))
    assert rank.code == 0, rank.err
    assert rank.report.evaluation_failure


def test_where_the_manifest_asks_for_it_the_job_fails_with_its_checkpoint_written(tmp_path):
    failing = training("raise", rank=1, on_failure="Fail")
    ranks = run_ranks(tmp_path, job(failing), 2, storage=tmp_path / "storage")
    assert [rank.code for rank in ranks] == [ExitCode.EVALUATION_FAILED] * 2
    for rank in ranks:
        assert rank.report.error.reason == "EvaluationFailed"
        assert "after step 2 failed on rank 1: ValueError" in rank.report.error.message
        assert rank.report.checkpoint.step == 2
    assert ranks[1].report.error.signature.error == "ValueError"
    assert figures_of(tmp_path / "storage") == {2: {}}


def test_with_parameter_servers_the_job_is_done_without_the_figures(tmp_path):
    with a_job(tmp_path, training("raise", rank=0)) as running:
        code, report = ended(running.workers[0], 0)
        assert (code, report.step, report.done) == (0, STEPS, True)
        assert report.evaluation_failure.startswith("the evaluation after step 6 failed on rank 0: ValueError")
        assert ended(running.workers[1], 1)[0] == 0
    assert figures_of(tmp_path / "storage") == {2: {}, 4: {}, 6: {}}


WAITING = {
    "shards": {"dataParallelShardDegree": 2},
    "a pipeline": {"pipelineParallelDegree": 2},
    "PipeDream": {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream"}},
}


@pytest.mark.parametrize("layout", WAITING)
def test_where_others_wait_for_the_rank_that_fails_the_next_attempt_goes_without_evaluation(tmp_path, layout):
    # The first stage of a pipeline reads samples, too.
    sizes = {"microBatchSize": 4, "globalBatchSize": None} if layout == "PipeDream" else {}
    described = job(training("raise", rank=0, **sizes), parallelism=WAITING[layout])
    first = run_ranks(tmp_path / "1", described, 2, storage=tmp_path / "storage")
    assert [rank.code for rank in first] == [ExitCode.EVALUATION_ABORTED, ExitCode.PEER_LOST], first[0].err
    error = first[0].report.error
    assert "the evaluation after step 2 failed on rank 0: ValueError" in error.message
    assert error.signature.error == "ValueError"
    assert figures_of(tmp_path / "storage") == {2: {}}
    second = run_ranks(tmp_path / "2", described, 2, storage=tmp_path / "storage", attempt=2)
    assert [rank.code for rank in second] == [0, 0], second[0].err
    assert "resuming after step 2" in second[0].out
    assert second[0].report.evaluation_failure.startswith(
        "no evaluation after step 6: an earlier attempt ended because"
    )
    assert figures_of(tmp_path / "storage") == {2: {}, 4: {}, 6: {}}


def test_with_shards_a_failure_that_ends_the_job_ends_it_for_good(tmp_path):
    described = job(training("raise", rank=1, on_failure="Fail"), parallelism=WAITING["shards"])
    ranks = run_ranks(tmp_path, described, 2, storage=tmp_path / "storage")
    assert [rank.code for rank in ranks] == [ExitCode.PEER_LOST, ExitCode.EVALUATION_FAILED]
    assert figures_of(tmp_path / "storage") == {2: {}}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_kill_in_an_evaluation_costs_no_checkpoint_and_the_next_attempt_evaluates(tmp_path, asynchronous):
    """Red where the evaluation goes before the checkpoint."""
    changes = {"checkpoint": {"interval": 6, "asynchronous": asynchronous}, "evaluation": {"batchSize": 2}}
    described = job(training("kill once", folder=tmp_path, **changes))
    (rank,) = run_ranks(tmp_path / "1", described, storage=tmp_path / "storage")
    assert rank.code == -signal.SIGKILL
    assert figures_of(tmp_path / "storage") == {6: {}}
    (rank,) = run_ranks(tmp_path / "2", described, storage=tmp_path / "storage", attempt=2)
    assert rank.code == 0, rank.err
    assert rank.report.done
    assert rank.report.metrics["loss"] == figures_of(tmp_path / "storage")[6]["loss"]
    lines = [json.loads(line) for line in (tmp_path / "storage" / "test" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_metrics/global_avg_loss" in line] == [6]


def test_what_has_been_evaluated_is_not_evaluated_again(tmp_path):
    described = job(training("none"))
    for attempt in (1, 2):
        (rank,) = run_ranks(tmp_path / str(attempt), described, storage=tmp_path / "storage", attempt=attempt)
        assert rank.code == 0, rank.err
    assert "evaluation:" not in rank.out


def test_sigterm_in_an_evaluation_ends_with_a_checkpoint_once_the_evaluation_is_over(tmp_path):
    described = job(training("wait", folder=tmp_path, checkpoint={"interval": 100}))
    with launch(tmp_path, described, storage=tmp_path / "storage", DISTTRAIN_GRACE_SECONDS="600") as world:
        world.wait_until((tmp_path / "evaluates").exists)
        world.processes[0].send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        (rank,) = world.ended()
    assert rank.code == ExitCode.STOPPED, rank.err
    assert rank.report.metrics["loss"] > 0
    assert list(figures_of(tmp_path / "storage")) == [2]


class TestCompleting:
    class Lost:
        """A save that ends because a rank is gone."""

        latest = None

        def settle(self):
            raise RuntimeError("Connection reset by peer")

    @pytest.mark.parametrize("error", [NonFiniteLoss("the loss is nan", step=3), EvaluationAborted("it failed")])
    def test_the_cause_is_reported_also_where_the_save_before_it_fails(self, error):
        with pytest.raises(type(error)), completing(self.Lost(), Reporter(0, None)):
            raise error
