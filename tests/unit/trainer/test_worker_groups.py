"""Workers of several ranks: what groups and servers compute together is what one process computes."""

from dataclasses import replace
from pathlib import Path

import pytest

from disttrain_api.jobconfig import JobConfig
from disttrain_api.mesh import Mesh
from disttrain_trainer.parameter_server.protocol.settings import worker_of, workers_of
from disttrain_trainer.parameter_server.worker.group import in_group
from disttrain_trainer.runtime.config import Config, resolve
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.comparisons import ACCURACY, LOSS, require_same, require_same_figures, series
from tests.unit.trainer.layouts import COMMON, GPT, PIPELINE, SHARD, TENSOR, TRAININGS
from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, job, run_cases, small, user

# Longer than a world may take: that limit shows where each rank stands, pytest's own shows only that one waits.
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

EVALUATED = {"evaluation": {"interval": 2}}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
# Servers clip nothing in Sync.
STEPS = {key: value for key, value in COMMON.items() if key != "maxGradientNorm"}
TRAINED = {
    "mlp": small(**STEPS, **EVALUATED, optimizer=SGD),
    "tokens": small(**STEPS, model=user("double_tagger"), data=user("ragged_tokens")),
    "gpt": small(**STEPS, **EVALUATED, **GPT, optimizer={"name": "AdamW", "learningRate": 0.01}),
    "clipped gpt": TRAININGS["gpt, AdamW"] | EVALUATED,
    "clipped mlp": TRAININGS["mlp, SGD"] | EVALUATED,
}
ONE_F_ONE_B = {PIPELINE: 2}
V_SHAPED = {PIPELINE: 2, "pipeline": {"schedule": "ZBVZeroBubble"}}

# training, parallelism, servers, changes of the training
TWO_GROUPS = {
    "dp2": ("mlp", {}, 1, {"gradientAccumulationSteps": 2}),
    "dp2 of tokens": ("tokens", {}, 2, {}),
    "fsdp2": ("gpt", {SHARD: 2}, 1, {}),
    "tp2": ("gpt", {TENSOR: 2}, 2, {}),
    "pp2": ("gpt", ONE_F_ONE_B, 2, {}),
    "pp2, first and last layer on one rank": ("gpt", V_SHAPED, 1, {}),
}
GROUP_OF_TWO = {
    "dp2": ("clipped mlp", {}, 2, {}),
    "tp2": ("clipped gpt", {TENSOR: 2, "sequenceParallel": True}, 1, {}),
    "pp2": ("clipped gpt", ONE_F_ONE_B, 2, {}),
}
GROUP_OF_FOUR = {
    "dp2 x tp2": ("clipped gpt", {TENSOR: 2}, 2, {"gradientAccumulationSteps": 2}),
    "pp2 x tp2": ("clipped gpt", {TENSOR: 2, **ONE_F_ONE_B}, 2, {}),
    "pp2 x fsdp2": ("clipped gpt", {SHARD: 2, **ONE_F_ONE_B}, 1, {}),
    "pp2 x dp2": ("clipped mlp", ONE_F_ONE_B, 1, {}),
}


def in_groups(folder, ranks, in_pod, layouts, **more):
    """Run the layouts: in step where there are several groups, Async where there is one."""
    settings = {"synchronization": "Async"} if ranks == in_pod else {}
    cases = {
        name: [
            {"training": TRAINED[training] | changes, "parallelism": layout, "servers": servers, "settings": settings}
        ]
        for name, (training, layout, servers, changes) in layouts.items()
    }
    return run_server_cases(folder, ranks, cases | more, in_pod)


def agrees(found, expected, ranks):
    """Fails where a rank has not come to its end, or a parameter or a line of the log differs."""
    assert found["errors"] == [[None]] * ranks
    require_same(found["parameters"], expected["parameters"])
    require_same_figures(found, expected, (LOSS, "grad_norm", "lr"))
    # Not all have held-out samples.
    assert series(found, ACCURACY) == pytest.approx(series(expected, ACCURACY))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    cases = {name: [{"training": training}] for name, training in TRAINED.items()}
    return run_cases(tmp_path_factory.mktemp("one"), 1, cases)


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    stopped = [
        {"training": TRAINED["gpt"], "parallelism": {TENSOR: 2}, "stop_after": 1},
        {"training": TRAINED["gpt"], "parallelism": {PIPELINE: 2}, "servers": 2},
    ]
    return in_groups(tmp_path_factory.mktemp("groups"), 4, 2, TWO_GROUPS, stopped=stopped)


@pytest.fixture(scope="module")
def group_of_two(tmp_path_factory):
    uneven = small(**STEPS, **GPT | {"model": user("double_gpt", heads=3, width=12)})
    refused = [{"training": uneven, "parallelism": {TENSOR: 2}, "settings": {"synchronization": "Async"}}]
    return in_groups(tmp_path_factory.mktemp("two"), 2, 2, GROUP_OF_TWO, refused=refused)


@pytest.fixture(scope="module")
def group_of_four(tmp_path_factory):
    return in_groups(tmp_path_factory.mktemp("four"), 4, 4, GROUP_OF_FOUR)


@pytest.mark.parametrize("layout", TWO_GROUPS)
def test_two_groups_in_step_are_one_process(one_process, two_groups, layout):
    agrees(two_groups[layout], one_process[TWO_GROUPS[layout][0]], ranks=4)


@pytest.mark.parametrize("layout", GROUP_OF_TWO)
def test_a_group_alone_is_one_process(one_process, group_of_two, layout):
    agrees(group_of_two[layout], one_process[GROUP_OF_TWO[layout][0]], ranks=2)


def test_heads_that_do_not_divide_are_refused_by_name(group_of_two):
    for (error,) in group_of_two["refused"]["errors"]:
        assert error.startswith("InvalidConfiguration: `parallelism.tensorParallelDegree`: Gpt fails in `blocks.0.att")


@pytest.mark.parametrize("layout", GROUP_OF_FOUR)
def test_a_group_of_two_kinds_of_ranks_is_one_process(one_process, group_of_four, layout):
    agrees(group_of_four[layout], one_process[GROUP_OF_FOUR[layout][0]], ranks=4)


def test_the_ranks_of_a_group_are_neighbours_and_count_as_one_worker():
    settings = {"mode": "ParameterServer", "parameterServer": {"groupReduce": "WithinGroup"}}
    layout = {"pipelineParallelDegree": 2, "tensorParallelDegree": 2, "dataParallel": settings}
    parsed = JobConfig.model_validate(job(TRAINED["gpt"] | {"globalBatchSize": 48}, parallelism=layout))
    mesh, batch = resolve(parsed, 24, 8)
    config = Config(parsed, mesh, batch, rank=13, world_size=24, local_world_size=8, report_dir=Path("/reports"))
    own = in_group(config)
    assert (workers_of(config), worker_of(config), config.mesh.data_parallel) == (3, 1, 6)
    assert (own.rank, own.world_size, own.store_file) == (5, 8, Path("/reports/meeting"))
    assert own.mesh == Mesh(pipeline=2, replicate=2, tensor=2)
    with pytest.raises(InvalidConfiguration, match="DISTTRAIN_REPORT_DIR is not set"):
        in_group(replace(config, report_dir=None))


def test_a_rank_by_itself_is_a_worker_and_meets_nobody():
    parsed = JobConfig.model_validate(job(TRAINED["mlp"], parallelism={"dataParallel": {"mode": "ParameterServer"}}))
    mesh, batch = resolve(parsed, 8, 4)
    config = Config(parsed, mesh, batch, rank=5, world_size=8, local_world_size=4)
    own = in_group(config)
    assert (workers_of(config), worker_of(config)) == (8, 5)
    assert (own.rank, own.world_size, own.store_file, own.mesh) == (0, 1, None, Mesh())


def test_a_stopped_job_goes_on_in_groups_of_another_layout(one_process, two_groups):
    assert all("Stopped" in errors[0] and errors[1] is None for errors in two_groups["stopped"]["errors"])
    require_same(two_groups["stopped"]["parameters"], one_process["gpt"]["parameters"])
