"""Free-form config on a real API server: what the schema bounds, and that the reader allows no more and no less."""

import json
from typing import Any

import pytest

from disttrain_api.size import CONFIG
from disttrain_api.validate import read_spec
from tests.integration.operator_process import JOBS
from tests.unit.api.test_size import PARTS, TOO_MUCH, deep, with_config
from tools.cluster.api import ApiClient
from tools.cluster.control_plane import ControlPlane

Raw = dict[str, Any]


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> ApiClient:
    return control_plane.api


def post(api: ApiClient, job: Raw | str) -> tuple[int, Raw]:
    """Code and answer of a POST that stores nothing. As text where Python's encoder stops at the depth."""
    path = JOBS.format("default") + "?dryRun=All&fieldValidation=Strict"
    answer = api.ask("POST", path, job) if isinstance(job, dict) else api.send("POST", path, job.encode())
    return answer.status, answer.json() if answer.status == 201 else json.loads(answer.body)


def nested(part: str, levels: int) -> str:
    """A job as text, with a config of so many levels: more than Python's encoder can write."""
    text = json.dumps(with_config(part, {"a": "HERE"}))
    return text.replace('"HERE"', '{"a":' * (levels - 1) + "1" + "}" * (levels - 1))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("levels", [CONFIG.depth + 1, 200, 1_100, 5_000])
def test_a_config_that_nests_too_deeply_is_refused_at_its_field(api: ApiClient, part: str, levels: int) -> None:
    code, answer = post(api, nested(part, levels))
    assert code == 422
    assert f"spec.training.{part}.config" in answer["message"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["deep", "a-list-of-lists", "keys", "a-long-string"])
def test_a_config_that_is_too_large_is_refused_at_its_field(api: ApiClient, part: str, kind: str) -> None:
    code, answer = post(api, with_config(part, TOO_MUCH[kind][0]))
    assert code == 422
    assert f"spec.training.{part}.config" in answer["message"]


@pytest.mark.parametrize("part", PARTS)
def test_a_config_at_its_bounds_is_stored_as_it_was_sent_and_read(api: ApiClient, part: str) -> None:
    config = {
        "object": {"a": deep(CONFIG.depth - 4)},
        "list": [deep(CONFIG.depth - 3), [], {}],
        "empty": [[[[[[]]]]]],
        "plain": [1, 1.5, True, None, "x", ""],
        "wide": [1] * (CONFIG.values - 100),
        "long": "x" * 80_000,
    }
    job = with_config(part, config)
    code, stored = post(api, job)
    assert code == 201, stored
    assert stored["spec"]["training"][part]["config"] == config
    spec, found = read_spec(stored["spec"])
    assert found == []
    assert spec.training is not None
    assert getattr(spec.training, part).config == config


def test_a_config_may_not_change_deep_inside_once_the_job_has_run(api: ApiClient) -> None:
    job = with_config("model", {"a": {"b": [{"c": 1}]}})
    job["metadata"]["name"] = "frozen"
    path = f"{JOBS.format('default')}/frozen"
    assert api.ask("POST", JOBS.format("default"), job).status == 201
    try:
        assert api.ask("PATCH", f"{path}/status", {"status": {"attempt": 1}}).status == 200
        change = {"training": {"model": {"config": {"a": {"b": [{"c": 2}]}}}}}
        refused = api.ask("PATCH", path, {"spec": change})
        assert refused.status == 422
        assert "`spec.training` may not change once the job has run" in refused.json()["message"]
        assert api.ask("PATCH", path, {"metadata": {"labels": {"a": "b"}}}).status == 200
    finally:
        api.ask("DELETE", path)
