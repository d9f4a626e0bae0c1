"""Data that are iterated: each replica its own part, as in one process, resumed exactly, refused where wrong."""

from types import SimpleNamespace
from typing import Any

import pytest

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Parallelism
from disttrain_trainer.build import build_sampler
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.data.stream import Stream, StreamSampler
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.stream_code import rows
from tests.unit.trainer.test_tasks import with_task
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

CODE = "tests.unit.trainer.stream_code"
REGULAR = {"evaluation": {"interval": 3}, "checkpoint": {"interval": 3}, "logging": {"interval": 1}, "steps": 7}
STATIC = {"dataParallel": {"staticGraph": True}}
LOCAL = {"dataParallel": {"mode": "LocalSGD"}}
SERVERS = {"dataParallel": {"mode": "ParameterServer"}}
PLANNED = {"model": user("planned_mlp", plan="whole")}


def streamed(kind: str = "Rows", noise: float = 0.0, size: int = 50, **changes: Any) -> dict[str, Any]:
    data = {"entrypoint": f"{CODE}:rows", "config": {"kind": kind, "noise": noise, "size": size}}
    return small(**{**REGULAR, "data": data, **changes})


def as_task() -> dict[str, Any]:
    return with_task("Classify") | {**REGULAR, "task": {"entrypoint": f"{CODE}:Streamed"}}


ALONE = {"whole": streamed(), "planned": streamed(**PLANNED)}
# training, parallelism, the case of one process
LIKE_ONE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dp2": (streamed(), {}, "whole"),
    "fsdp2": (streamed(), {SHARD: 2}, "whole"),
    "tp2": (streamed(**PLANNED), {TENSOR: 2}, "planned"),
    "tp2, never taken apart": (streamed("Whole", **PLANNED), {TENSOR: 2}, "planned"),
    "accumulated": (streamed(gradientAccumulationSteps=4), {}, "whole"),
    "static graph": (streamed(), STATIC, "whole"),
    "task": (as_task(), {}, "whole"),
}
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": (streamed(noise=0.1), {}),
    "fsdp2": (streamed(noise=0.1), {SHARD: 2}),
    "static graph": (streamed(noise=0.1), STATIC),
    "local sgd": (streamed(noise=0.1), LOCAL),
    "task": (as_task(), {}),
}
PLACE = f"`training.data.entrypoint`: {CODE}:rows"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "whole": (streamed("Whole"), {}, f"{PLACE} returned training samples that are iterated, without shard(index, cou"),
    "forgetful": (streamed("Forgetful"), {}, "that are iterated, a Forgetful without state_dict: a job that resumes"),
    "odd": (streamed("Odd"), {}, f"{PLACE}, part 1 of 2: state_dict()['at'] is a builtins.object, expected tensors"),
    "one way": (
        streamed("OneWay"),
        {},
        "1 of 2: load_state_dict does not take what state_dict returned: TypeError: no",
    ),
    "pipeline": (streamed(), {PIPELINE: 2}, "iterated, which the stages of a pipeline read by their number: use"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked_for: Any) -> dict[str, dict[str, Any]]:
    one = {name: [{"training": training}] for name, training in ALONE.items()}
    cases = {name: [{"training": given, "parallelism": layout}] for name, (given, layout, _) in LIKE_ONE.items()}
    for name, (training, layout) in RESUMED.items():
        run = {"training": training, "parallelism": layout}
        # Between two checkpoints, right after one, and twice.
        resumed = [{**run, "stop_after": 2}, {**run, "stop_after": 3}, run]
        runs = {"resumed": resumed, "at 3": [{**run, "stop_after": 3}, run]}
        asked = asked_for("test_stream", "how", resumed=name)
        cases |= {f"{name}, {how}": runs[how] for how in sorted(asked)}
        if asked:
            cases[f"{name}, through"] = [run]
    for name, (training, layout, _) in REFUSED.items():
        cases[f"refused {name}"] = [{"training": training, "parallelism": layout}]
    cases["renamed"] = [{"training": streamed(), "stop_after": 3}, {"training": streamed("Renamed")}]
    cases["fewer"] = [
        {"training": streamed(**PLANNED), "stop_after": 3},
        {"training": streamed(**PLANNED), "parallelism": {TENSOR: 2}},
    ]
    numbered = small(**REGULAR)
    cases["numbered before"] = [{"training": numbered, "stop_after": 3}, {"training": streamed()}]
    folder = tmp_path_factory.mktemp("worlds")
    return run_cases(folder / "one", 1, one) | run_cases(folder / "two", 2, cases)


@pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
@pytest.mark.parametrize("name", LIKE_ONE)
def test_parts_of_replicas_train_what_one_process_trains(results: dict[str, dict[str, Any]], name: str) -> None:
    found, expected = results[name], results[LIKE_ONE[name][2]]
    assert found["errors"] == [None]
    require_same(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("how", ["resumed", "at 3"])
@pytest.mark.parametrize("resumed", RESUMED)
def test_a_job_goes_on_at_its_position(results: dict[str, dict[str, Any]], resumed: str, how: str) -> None:
    found = results[f"{resumed}, {how}"]
    assert found["errors"][-1] is None
    assert all(error.startswith("Stopped: ") for error in found["errors"][:-1])
    require_same(found["parameters"], results[f"{resumed}, through"]["parameters"], 0.0)


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_a_layout_or_checkpoint_cannot_take_are_named(results: dict[str, dict[str, Any]], name: str) -> None:
    assert REFUSED[name][2] in results[f"refused {name}"]["errors"][0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("renamed", f"{PLACE}, part 1 of 2: load_state_dict raised KeyError: 'offset'; go on with the data that wrote"),
        ("fewer", "holds positions of 2 parts of the data, and here are 1 replicas: go on with as many, or begin"),
    ],
)
def test_a_position_that_does_not_fit_is_named(results: dict[str, dict[str, Any]], case: str, message: str) -> None:
    error = results[case]["errors"][1]
    assert error.startswith("CheckpointMismatch: ")
    assert message in error


def test_other_data_than_the_checkpoints_begin_at_their_beginning(results: dict[str, dict[str, Any]]) -> None:
    assert results["numbered before"]["errors"][1] is None
    assert results["numbered before"]["metrics"][-1]["step"] == 7


def opened(size: int = 10, per_step: int = 4) -> Stream:
    stream = Stream(rows(size=size)[0], "here")
    stream.open(0, 1, per_step)
    return stream


def first_numbers(samples: list[Any]) -> list[float]:
    return [float(x[0]) for x, _ in samples]


def test_a_step_that_is_asked_for_again_is_read_again() -> None:
    stream = opened()
    numbers = first_numbers([rows()[0].rows[index % 10] for index in range(12)])
    assert first_numbers([stream[0], stream[1]]) == numbers[:2]
    assert stream.first == 0
    assert first_numbers([stream[number] for number in range(8)]) == numbers[:8]
    assert first_numbers([stream[number] for number in range(4, 12)]) == numbers[4:]


def test_the_position_before_a_step_is_known_once_the_step_was_read() -> None:
    stream = opened()
    for number in range(8):
        assert len(stream[number]) == 2
    assert [stream.position_before(number) for number in (4, 8)] == [{"position": 4}, {"position": 8}]
    other = opened()
    other.resume(4, stream.position_before(4))
    assert first_numbers([other[4], other[5]]) == first_numbers([stream[4], stream[5]])


def test_data_without_samples_are_named() -> None:
    with pytest.raises(DataNotFound, match="here, part 1 of 1: the training samples end before the first one"):
        opened(size=0)[0]


def test_each_replica_numbers_its_own_samples() -> None:
    sampler = StreamSampler.of(Batch(micro=2, accumulation=3, world=12), replicas=2)
    cursor = sampler.advance(Cursor())
    for replica in (0, 1):
        assert [slots.indices.tolist() for slots in sampler.microbatches(cursor, replica)] == [[6, 7], [8, 9], [10, 11]]


def test_servers_refuse_data_that_are_iterated() -> None:
    data = Datasets(Stream(rows()[0], "`training.data.entrypoint`: mine:data"), None)
    config = SimpleNamespace(job=SimpleNamespace(parallelism=Parallelism.model_validate(SERVERS)))
    world = SimpleNamespace(mesh=SimpleNamespace(pipeline=1))
    with pytest.raises(InvalidConfiguration) as raised:
        build_sampler(data, config, world)  # type: ignore[arg-type]
    message = (
        "mine:data returned training samples that are iterated, which parameter servers assign by their number: use"
    )
    assert message in str(raised.value)
