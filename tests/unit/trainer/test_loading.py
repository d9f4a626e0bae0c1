"""Processes that read samples ahead change nothing but the time; what samples draw is a function of their place."""

from contextlib import closing

import psutil
import pytest
import torch

from disttrain_api.batch import Batch
from disttrain_api.training import Training
from disttrain_trainer.data.loading import Loader
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.tasks.supervised import Supervised
from tests.unit.trainer.comparisons import require_same, require_same_bits
from tests.unit.trainer.loading_code import drawn
from tests.unit.trainer.worlds import job, launch, run_cases, run_ranks, small

CODE = "tests.unit.trainer.loading_code"
DRAWN = small(
    steps=7, data={"entrypoint": f"{CODE}:drawn"}, logging={"interval": 1}, microBatchSize=6,
    evaluation={"interval": 3}, checkpoint={"interval": 100},
)  # fmt: skip
AHEAD = {**DRAWN, "dataWorkers": 2}
LAYOUTS = {
    "replicas": {},
    "shards": {"dataParallelShardDegree": 2},
    "pipeline": {"pipelineParallelDegree": 2},
    "flushless": {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream2BW"}},
    "local": {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 2}}},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    cases = {}
    for name in sorted(asked_for("test_loading", "name")):
        parallelism = LAYOUTS[name]
        for how, training in (("here", DRAWN), ("ahead", AHEAD)):
            run = {"training": training, "parallelism": parallelism}
            cases[f"{name}, {how}"] = [run]
            cases[f"{name}, {how}, resumed"] = [{**run, "stop_after": 4}, run]
    alone = run_cases(tmp_path_factory.mktemp("alone"), 1, {"one process": [{"training": DRAWN}]})
    return run_cases(tmp_path_factory.mktemp("two"), 2, cases) | alone


def figures(result):
    names = ("loss_metrics/global_avg_loss", "validation_metrics/global_avg_loss")
    return [line[name] for line in result["metrics"] for name in names if name in line]


@pytest.mark.parametrize("other", ["here, resumed", "ahead", "ahead, resumed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_job_trains_to_the_same_bits_whoever_reads_its_samples(results, name, other):
    expected, found = results[f"{name}, here"], results[f"{name}, {other}"]
    assert found["errors"][-1] is None, found["errors"]
    assert expected["errors"] == [None]
    assert figures(found) == figures(expected)
    assert len(figures(expected)) == 7 + 3
    require_same_bits(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("name", ["replicas", "shards", "pipeline"])
def test_all_layouts_draw_the_same(results, name):
    require_same(results[f"{name}, here"]["parameters"], results["one process"]["parameters"])


@pytest.mark.parametrize(
    ("how", "reason", "sentence"),
    [
        ("raises", "RankFailed", "LookupError: sample 7 is nowhere"),
        ("leaves", "RankFailed", "called sys.exit"),
        ("is odd", "InvalidConfiguration", "a tensor of shape [3]"),
    ],
)
def test_an_error_is_the_same_whoever_meets_it(tmp_path, how, reason, sentence):
    training = small(data={"entrypoint": f"{CODE}:failing", "config": {"how": how}})
    errors = {}
    for workers in (0, 1):
        (rank,) = run_ranks(tmp_path / str(workers), job({**training, "dataWorkers": workers}))
        errors[workers] = rank.report.error
    assert errors[0] == errors[1]
    assert errors[0].reason == reason
    assert sentence in errors[0].message


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises what does not travel", "RuntimeError: UnpicklableError: sample 7 is nowhere"),
        ("is killed", "DataLoader worker (pid"),
    ],
)
def test_a_process_that_is_lost_ends_the_rank_with_a_sentence(tmp_path, how, sentence):
    training = small(data={"entrypoint": f"{CODE}:failing", "config": {"how": how}}, dataWorkers=2)
    (rank,) = run_ranks(tmp_path, job(training))
    assert sentence in rank.report.error.message, rank.err
    # A second loss at the same step is no reason to give up: memory may have been short.
    assert (rank.report.error.signature is None) == (how == "is killed")


def test_nothing_outlives_a_rank_that_is_killed(tmp_path):
    with launch(tmp_path, job({**AHEAD, "steps": 1_000_000})) as world:
        process = psutil.Process(world.processes[0].pid)
        world.wait_until(lambda: world.reached(1))
        readers = process.children()
        assert len(readers) == 2
        process.kill()
        world.ended()
    _, alive = psutil.wait_procs(readers, timeout=60)
    assert not alive


def test_samples_that_are_iterated_are_read_by_the_rank(tmp_path):
    streamed = {"entrypoint": "tests.unit.trainer.stream_code:rows"}
    (rank,) = run_ranks(tmp_path, job(small(data=streamed, dataWorkers=1)))
    assert rank.report.error.reason == "InvalidConfiguration"
    assert "`training.dataWorkers`: `training.data.entrypoint`: " in rank.report.error.message


def test_readers_of_a_rank_with_a_gpu_leave_the_gpu_alone(monkeypatch):
    """A driver that a process has met before it was forked refuses the fork."""

    def refuse(*_):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "init", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    training, _ = drawn()
    sampler = Sampler(len(training), 0, Batch(micro=4, accumulation=2, world=8), 1)
    loader = Loader(Supervised(Training(steps=1)), training, sampler, 0, 1)
    with closing(loader):
        found = loader.load(Cursor(), torch.device("cpu"))
    assert [one.samples for one in found] == [4, 4]
