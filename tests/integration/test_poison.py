"""Objects made to hurt, on a real API server: they cost their owner what they ask for, and nobody else anything."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import yaml

from disttrain_api.bounds import MAX_MESSAGE_BYTES
from tests.builders import a_manifest
from tests.integration.operator_process import (
    CRD,
    JOBS,
    OperatorProcess,
    Team,
    eventually,
    install_crd,
    running_operator,
)
from tests.soak import SOAK
from tools.cluster.control_plane import ControlPlane

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

Raw = dict[str, Any]
NUMBERS = itertools.count()
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disttrainingjobs.disttrain.io"
FREE_FORM = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "default": {}}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        install_crd(started.api)
        yield started


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    with running_operator(plane, tmp_path) as started:
        yield started


@pytest.fixture
def good(plane: ControlPlane) -> Team:
    return Team(plane.api, f"good-{next(NUMBERS)}")


@pytest.fixture
def evil(plane: ControlPlane) -> Team:
    return Team(plane.api, f"evil-{next(NUMBERS)}")


@pytest.fixture
def loose(plane: ControlPlane) -> Iterator[None]:
    """Configs have no bounds, as before there were any; afterwards they have them again."""
    definition = yaml.safe_load(CRD.read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for part in ("model", "data"):
        spec["properties"]["training"]["properties"][part]["properties"]["config"] = FREE_FORM
    define(plane, definition)
    yield
    bind(plane)


def bind(plane: ControlPlane) -> None:
    """The definition as it is delivered. Returns when the API server goes by it."""
    define(plane, yaml.safe_load(CRD.read_text()))
    eventually(
        lambda: plane.api.send("POST", f"{JOBS.format('default')}?dryRun=All", deep_job("probe", 9)).status == 422
    )


def define(plane: ControlPlane, definition: Raw) -> None:
    """Write the definition; again where others wrote meanwhile, or the server took too long."""

    def is_written() -> bool:
        stored = plane.api.get(CRD_PATH)
        body = {**stored, "spec": {**stored["spec"], "versions": definition["spec"]["versions"]}}
        answer = plane.api.ask("PUT", CRD_PATH, body)
        assert answer.status in (200, 409, 504), answer
        return answer.status == 200

    eventually(is_written)


def deep_job(name: str, levels: int) -> bytes:
    """A job with a config of so many levels: more than Python's encoder writes."""
    training = {"model": {"name": None, "entrypoint": "mine:make", "config": {"a": "HERE"}}}
    text = json.dumps(a_manifest(name, training=training) | {"metadata": {"name": name}})
    return text.replace('"HERE"', '{"a":' * (levels - 1) + "1" + "}" * (levels - 1)).encode()


def post_until_taken(team: Team, job: bytes) -> None:
    """The API server may take a moment to go by a new definition."""
    eventually(lambda: team.api.send("POST", JOBS.format(team.namespace), job).status in (201, 409))


def condition_of(team: Team, name: str, type_: str) -> Raw:
    """A condition of a job whose spec Python's own decoder does not read."""
    body = team.api.send("GET", f"{JOBS.format(team.namespace)}/{name}", None).body
    status = orjson.loads(body).get("status") or {}
    found = [entry for entry in status.get("conditions", []) if entry["type"] == type_]
    return found[0] if found else {"status": "Unknown", "reason": "", "message": ""}


def runs_as_ever(team: Team, name: str = "job") -> None:
    """From POST to running, as for everybody."""
    team.create(name)
    eventually(lambda: len(pods_of(team, name)) == 2, lambda: team.status(name))
    team.run(pods_of(team, name))
    team.wait_for("Running", name=name)


def pods_of(team: Team, name: str) -> list[Raw]:
    return [pod for pod in team.pods() if pod["metadata"]["labels"].get("disttrain.io/job-name") == name]


def cached_jobs(operator: OperatorProcess) -> int:
    return int(float(operator.page("metrics").split("\ndisttrain_cached_jobs ")[1].split()[0]))


def assert_calm(operator: OperatorProcess) -> None:
    assert operator.health("healthz") == 200
    assert operator.health("readyz") == 200
    assert "Traceback" not in operator.log(), operator.log()[-5000:]


# --- what no parser reads, or no walker walks ---

LEVELS = [7, 200, 500, 900]
"""Those that can be decoded: what nests deeper is stepped over (test_undecodable.py)."""
DEEPER = [1_100, 5_000]


def test_jobs_that_nest_thousands_of_levels_deep_fail_with_their_field_and_cost_nobody_else(
    plane: ControlPlane, operator: OperatorProcess, good: Team, evil: Team, loose: None
) -> None:
    runs_as_ever(good, "before")
    for levels in (*LEVELS, *DEEPER):
        post_until_taken(evil, deep_job(f"deep-{levels}", levels))
    runs_as_ever(good, "beside")
    for levels in LEVELS:
        name = f"deep-{levels}"
        eventually(
            lambda name=name: condition_of(evil, name, "Failed")["status"] == "True", lambda: operator.log()[-3000:]
        )
        failed = condition_of(evil, name, "Failed")
        assert failed["reason"] == "InvalidSpec"
        assert failed["message"].startswith("spec.training.model.config: is nested more than 6 levels deep")
        assert len(failed["message"].encode()) <= MAX_MESSAGE_BYTES
    assert_calm(operator)


def test_an_operator_that_finds_such_jobs_starts_and_works(
    plane: ControlPlane, good: Team, evil: Team, loose: None, tmp_path: Path
) -> None:
    """Also where the definition forbids them by now."""
    for levels in (*LEVELS, *DEEPER):
        post_until_taken(evil, deep_job(f"deep-{levels}", levels))
    bind(plane)
    with running_operator(plane, tmp_path) as operator:
        for levels in LEVELS:
            name = f"deep-{levels}"
            eventually(lambda name=name: condition_of(evil, name, "Failed")["status"] == "True")
        runs_as_ever(good)
        # Their changes and deletions are seen like those of others.
        before = cached_jobs(operator)
        for levels in LEVELS:
            path = f"{JOBS.format(evil.namespace)}/deep-{levels}"
            assert evil.api.ask("PATCH", f"{path}/status", {"status": {"mesh": "dp2"}}).status == 200
            assert evil.api.ask("DELETE", path).status == 200
        eventually(lambda: cached_jobs(operator) == before - len(LEVELS))
        runs_as_ever(good, "another")
        assert_calm(operator)


# --- what costs time and memory ---


def test_a_job_with_thousands_of_unknown_fields_fails_with_a_short_list(
    operator: OperatorProcess, good: Team, evil: Team, loose: None
) -> None:
    def job(count: int) -> bytes:
        config = {f"hiddenSize{number}": 1 for number in range(count)}
        return json.dumps(
            a_manifest(f"wrong-{count}", training={"model": {"config": config}})
            | {"metadata": {"name": f"wrong-{count}"}}
        ).encode()

    for count in (4_000, 20_000):
        post_until_taken(evil, job(count))
    runs_as_ever(good)
    for count, said in ((4_000, "unknown field; did you mean `hiddenSizes`?"), (20_000, "holds more than 4096 values")):
        failed = evil.wait_for("Failed", reason="InvalidSpec", name=f"wrong-{count}")
        assert said in failed["message"]
        assert len(failed["message"].encode()) <= MAX_MESSAGE_BYTES
    assert evil.wait_for("Failed", name="wrong-4000")["message"].endswith(" more")
    assert_calm(operator)


def rss(operator: OperatorProcess) -> int:
    assert operator.process is not None
    process = psutil.Process(operator.process.pid)
    return int(max(each.memory_info().rss for each in (process, *process.children(recursive=True)))) // 2**20


def a_heavy_job(name: str) -> bytes:
    """Half a megabyte of JSON that is ten times as much in memory, and does nothing: it is suspended."""
    config = {f"k{number}": [[] for _ in range(3_000)] for number in range(80)}
    training = {"model": {"name": None, "entrypoint": "mine:make", "config": config}}
    job = a_manifest(name, training=training, suspend=True) | {"metadata": {"name": name}}
    return json.dumps(job, separators=(",", ":")).encode()


@pytest.mark.skipif(not SOAK, reason="takes minutes; tests/unit/operator/test_kept.py bounds the memory of each job")
def test_large_jobs_that_do_nothing_do_not_fill_the_memory(
    plane: ControlPlane, evil: Team, good: Team, loose: None, tmp_path: Path
) -> None:
    figures = []
    with running_operator(plane, tmp_path) as operator:
        runs_as_ever(good)
        for count in (2, 10, 20):
            for number in range(count):
                post_until_taken(evil, a_heavy_job(f"heavy-{count}-{number}"))
            for number in range(count):
                evil.wait_for("Failed", reason="InvalidSpec", name=f"heavy-{count}-{number}")
            figures.append(rss(operator))
        runs_as_ever(good, "beside")
    with running_operator(plane, tmp_path) as operator:
        runs_as_ever(good, "after")
        figures.append(rss(operator))
    print("RSS in MB after 2, 12 and 32 jobs, and of another process:", *figures)
    # What is being read takes a moment's memory, whatever is kept: as much for many as for few.
    assert max(figures) < 300, figures
    assert figures[2] < figures[1] + 60, figures


# --- odd last words ---

LAST_WORDS = {
    "not-a-number": '{"progress": {"rank": 0, "step": 5, "totalSteps": 9, "loss": NaN, "samplesPerSecond": Infinity}}',
    "beyond-64-bits": '{"progress": {"rank": 0, "step": 1180591620717411303424, "totalSteps": 9}}',
    "no-time": '{"progress": {"rank": 0, "checkpoint": {"step": 5, "path": "x", "time": "soon"}}}',
    "half-a-character": '{"failure": {"rank": 0, "exitCode": 1, "message": "\\ud800", "logTail": "\\u0000"}}',
    "a-figure-without-a-name": '{"progress": {"rank": 0, "step": 5, "totalSteps": 9, "metrics": {"": 1, "x": 1e999}}}',
    "deep": '{"failure":' * 300 + "1" + "}" * 300,
}


@pytest.mark.parametrize("words", LAST_WORDS.values(), ids=LAST_WORDS.keys())
def test_odd_last_words_do_not_hold_their_job(operator: OperatorProcess, evil: Team, words: str) -> None:
    evil.create()
    first, second = evil.wait_for_pods(2)
    evil.run([first, second])
    evil.wait_for("Running")
    for pod in (first, second):
        end_with(evil, pod, words)
    eventually(lambda: evil.status().get("attempt") == 2, lambda: [evil.status(), operator.log()[-2000:]])
    assert evil.status()["attempts"][0]["verdict"]["exitCode"] == 1
    assert "trying again" not in operator.log()


def end_with(team: Team, pod: Raw, message: str) -> None:
    state = {"exitCode": 1, "reason": "Error", "message": message, "finishedAt": "2026-01-01T12:00:00Z"}
    container = {
        "name": "trainer",
        "image": "x:1",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": state},
    }
    team.set_status(pod, {"phase": "Failed", "containerStatuses": [container]})
