"""What a job needs, against what a machine has."""

from dataclasses import replace
from typing import Any

import pytest

from disttrain.local.demand import COMMAND, EXECUTED, FORKED, Costs, Machine, demand_of, find_misfit
from disttrain_api.spec import JobSpec
from tests.builders import a_manifest

GIB = 2**30
LAPTOP = Machine(cores=8, memory=16 * GIB, free_memory=10 * GIB, tasks=30_000, files=1_000_000)
OWN: dict[str, Any] = {
    "training": None,
    "workers": {"template": {"spec": {"containers": [{"name": "trainer", "command": ["python", "x.py"]}]}}},
}


def spec_of(**spec: Any) -> JobSpec:
    return JobSpec.model_validate(a_manifest(**spec)["spec"], by_alias=True, by_name=False)


def mlp(width: int, **model: Any) -> dict[str, Any]:
    """About width x width parameters."""
    return {"model": {"name": "mlp", "config": {"hiddenSizes": [width, width]}, **model}}


def misfit(costs: Costs = FORKED, machine: Machine = LAPTOP, **spec: Any) -> tuple[bool, str] | None:
    found = find_misfit(demand_of(spec_of(**spec), costs), machine)
    return found and (found.certain, found.sentence)


@pytest.mark.parametrize("costs", [FORKED, EXECUTED, COMMAND])
def test_a_job_of_a_few_ranks_fits(costs: Costs) -> None:
    assert misfit(costs, workers={"replicas": 4, "processesPerPod": 2}) is None


def test_far_more_pods_than_the_machine_can_hold_do_not_fit() -> None:
    sentence = (
        "the job does not fit this machine: 5,000 ranks in 5,000 pods need at least 162.0 GiB of memory (there are "
        "16.0 GiB), and at least 50,000 processes and threads (its limits leave 30,000)"
    )
    assert misfit(workers={"replicas": 5000}) == (True, sentence)


def test_pods_of_ones_own_command_count_too() -> None:
    found = misfit(COMMAND, **{**OWN, "workers": {**OWN["workers"], "replicas": 10_000}})
    assert found[0]
    assert "10,000 ranks in 10,000 pods need at least 39.1 GiB of memory" in found[1]


def test_servers_are_pods_too() -> None:
    mode = {"dataParallel": {"mode": "ParameterServer"}}
    found = misfit(workers={"replicas": 1}, parameterServers={"replicas": 5000}, parallelism=mode)
    assert "1 rank in 5,001 pods need at least" in found[1]


def test_ranks_that_share_few_cores_are_doubtful() -> None:
    assert misfit(workers={"replicas": 1, "processesPerPod": 128}) is None
    assert misfit(workers={"replicas": 1, "processesPerPod": 129}) == (
        False,
        "the job may not fit this machine: 129 ranks in 1 pod need 129 cores to run side by side (there are 8)",
    )


@pytest.mark.parametrize(
    ("width", "certain"), [(10_000, None), (20_000, False), (24_000, True), (1_000_000, True)]
)  # fmt: skip
def test_a_model_that_does_not_fit_is_named_by_its_parameters(width: int, certain: bool | None) -> None:
    # Two replicas, 16 bytes for each parameter of each.
    found = misfit(training=mlp(width))
    assert (found and found[0]) == certain
    if found:
        assert f"2 ranks in 2 pods, with {width * width + 76 * width + 10:,} parameters, need" in found[1]


def test_shards_count_once_however_many_replicas_there_could_be() -> None:
    large = mlp(20_000, metaDevice=True)
    replicas = {"workers": {"replicas": 4}, "training": large}
    sharded = {**replicas, "parallelism": {"dataParallelShardDegree": 4}}
    assert demand_of(spec_of(**sharded), FORKED).memory * 3 < demand_of(spec_of(**replicas), FORKED).memory
    # Without metaDevice each rank builds it whole, perhaps at the same time.
    built_whole = demand_of(spec_of(**{**sharded, "training": mlp(60_000)}), FORKED)
    assert built_whole.peak_memory == pytest.approx(built_whole.memory, rel=0.05)
    sgd = {**mlp(60_000), "optimizer": {"name": "SGD"}}
    with_less_state = demand_of(spec_of(**{**sharded, "training": sgd}), FORKED)
    assert with_less_state.peak_memory > 1.5 * with_less_state.memory


def test_on_gpus_the_host_holds_what_is_built_alone() -> None:
    host = demand_of(spec_of(training=mlp(20_000)), FORKED)
    gpus = demand_of(spec_of(training=mlp(20_000), workers={"replicas": 2, "gpusPerPod": 1}), FORKED)
    assert gpus.memory < host.memory / 4
    offloaded = {**mlp(20_000), "offload": {"parameters": True}}
    shard = {"dataParallelShardDegree": 2}
    on_host = demand_of(
        spec_of(training=offloaded, parallelism=shard, workers={"replicas": 2, "gpusPerPod": 1}), FORKED
    )  # fmt: skip
    assert on_host.memory > 2 * gpus.memory


def test_a_model_from_an_entry_point_is_not_guessed() -> None:
    model = {"model": {"name": None, "entrypoint": "mine:make"}}
    assert demand_of(spec_of(training=model), FORKED).parameters is None


def test_limits_of_open_files_count() -> None:
    few = replace(LAPTOP, files=256, cores=64)
    assert misfit(machine=few, workers={"replicas": 20}) is None
    doubtful = misfit(machine=few, workers={"replicas": 60})
    assert doubtful[0] is False
    assert "304 open files (`ulimit -Hn` is 256)" in doubtful[1]
    certain = misfit(machine=few, workers={"replicas": 100})
    assert certain[0] is True
    assert "264 open files (`ulimit -Hn` is 256)" in certain[1]


def test_what_a_machine_does_not_tell_refuses_nothing() -> None:
    unknown = Machine(cores=10_000, memory=None, free_memory=None, tasks=None, files=None)
    assert misfit(machine=unknown, workers={"replicas": 10_000}, training=mlp(1_000_000)) is None
