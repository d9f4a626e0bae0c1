"""A container that was meant to train is not passed over because of its name."""

from typing import Any

import pytest

from disttrain_api.rules.misnamed import advice
from disttrain_api.validate import problems, read_job
from tests.builders import a_manifest
from tests.refusals.refusal import own_program, untrained


def a_container(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "an/image:1"} | fields


def advised(**spec: Any) -> list[str]:
    job, found = read_job(a_manifest(**spec))
    assert found == []
    return list(advice(job.spec))


@pytest.mark.parametrize(
    ("containers", "hint"),
    [
        ([a_container("pytorch")], "call the container `pytorch` `trainer`"),
        ([{"name": "main", "command": ["train"]}, {"name": "empty"}], "call the container `main` `trainer`"),
        (
            [a_container("ray-worker"), a_container("metrics")],
            "call the one of the containers `ray-worker`, `metrics` that trains `trainer`",
        ),
        ([a_container("other"), {"name": "trainer", "args": ["x"]}], None),
        ([{"name": "pytorch"}], None),
    ],
)
def test_where_nothing_runs_the_container_is_named(containers: list[dict[str, Any]], hint: str | None) -> None:
    (found,) = problems(a_manifest(**untrained(own_program(*containers))))
    nothing = "nothing to run: set `spec.training`, or an `image` or a `command` of the container `trainer`"
    assert found.message == nothing
    assert (found.path, found.hint) == ("spec.workers", hint)
    (found,) = problems(a_manifest(**untrained(own_program(), parameterServers=own_program(*containers))))
    assert (found.path, found.hint) == ("spec.parameterServers", hint)


def test_an_image_that_would_be_passed_over_while_the_operators_trains_is_named() -> None:
    beside = (
        "runs beside the container `trainer`, whose image is the operator's: call it `trainer` if its image is to"
        " train, else add `- name: trainer`"
    )
    assert advised(workers=own_program(a_container("pytorch"))) == [
        f"spec.workers.template: the container `pytorch` {beside}"
    ]
    mode = {"dataParallel": {"mode": "ParameterServer"}}
    assert advised(parallelism=mode, parameterServers=own_program(a_container("tensorflow"))) == [
        f"spec.parameterServers.template: the container `tensorflow` {beside}"
    ]


@pytest.mark.parametrize(
    "workers",
    [
        {},
        own_program(a_container("trainer")),
        own_program(a_container("shipper"), {"name": "trainer"}),
        own_program(a_container("shipper")) | {"image": "an/image:1"},
        own_program(a_container("shipper"), a_container("metrics")),
    ],
)
def test_helpers_of_a_trainer_are_nobodys_mistake(workers: dict[str, Any]) -> None:
    assert advised(workers=workers) == []


def test_a_program_of_ones_own_has_its_rule() -> None:
    assert advised(**untrained(own_program(a_container("shipper")) | {"command": ["train"]})) == []
