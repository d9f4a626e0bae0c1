"""A status that another version of the operator wrote is read, decided upon, and written back with its own words."""

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.status import ConditionType, JobStatus
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.decide.reading import observe
from tests.builders import NOW, a_raw_job, a_report, ended
from tests.unit.decide.world import World, a_running_world, a_world

Raw = dict[str, Any]

FOREIGN = {
    "type": "ElasticResizing",
    "status": "True",
    "reason": "Growing",
    "message": "from 4 to 8 workers",
    "lastTransitionTime": "2026-01-01T11:00:00Z",
    "observedGeneration": 1,
}


def written(status: JobStatus) -> Raw:
    raw: Raw = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return raw


def holds(whole: Any, part: Any) -> bool:
    """Whether all that stands in `part` stands in `whole`, which may have defaults besides."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return bool(whole == part)


def a_restarted_world() -> World:
    world = a_running_world()
    world.end(0, 1, report=a_report(50, checkpoint=50))
    world.end(1, 1)
    return world.settle()


def statuses() -> list[Raw]:
    """Statuses of jobs at several points of their lives."""
    finished = a_running_world().end(0, 0).end(1, 0).settle()
    suspended = a_running_world().edit(suspend=True).settle().confirm_deletions().settle()
    worlds = [a_world(), a_running_world(), a_restarted_world(), finished, suspended]
    return [world.raw_job.get("status") or {} for world in worlds]


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "Queued"},
        {"conditions": [FOREIGN]},
        {"attempt": 1, "attempts": [{"number": 1, "startTime": "2026-01-01T11:00:00Z", "mood": "good"}]},
        {"elasticity": {"workers": 8}},
        {"progress": {"step": 1, "totalSteps": 2, "updateTime": "2026-01-01T11:00:00Z", "epoch": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_words_and_fields_of_another_version_are_read_and_kept(change: Raw) -> None:
    job = job_facts(a_raw_job(status=change))
    assert holds(written(job.status), change)
    decide(job, observe([]), NOW)


def test_a_condition_of_another_version_stays_beside_ours() -> None:
    world = a_running_world()
    world.raw_job["status"]["conditions"].append(FOREIGN)
    world.end(0, 1).end(1, 1).settle()
    conditions = {entry["type"]: entry for entry in world.raw_job["status"]["conditions"]}
    assert conditions["ElasticResizing"] == FOREIGN
    assert set(conditions) == {*ConditionType, "ElasticResizing"}
    assert conditions["Restarting"]["status"] == "True"


def test_a_verdict_of_another_version_stays_and_counts_as_a_failure() -> None:
    world = a_restarted_world()
    verdict = world.raw_job["status"]["attempts"][0]["verdict"]
    verdict |= {"class": "SilentDataCorruption", "action": "RestartElsewhere", "reason": "ParityError"}
    kept = deepcopy(verdict)
    world.confirm_deletions().settle().run_all()
    world.end(0, 1).end(1, 1).settle()
    assert world.raw_job["status"]["attempts"][0]["verdict"] == kept
    assert world.raw_job["status"]["restarts"] == 2


def test_a_job_that_runs_with_a_spec_of_another_version_is_left_alone() -> None:
    world = a_running_world().edit(training={"mood": "good"})
    decision = world.decide()
    assert (decision.reason, decision.status, decision.actions) == ("InvalidSpec", None, ())
    assert decision.message.startswith("left alone: spec.training.mood: ")


WORDS = ("Queued", "True", "Failed", "RestartGang", "0/0", "", "ï" * 40, "Program", "worker", "Running")
TIMES = ("soon", "", "0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01T11:59:00Z", "2026-01-01T12:30:00Z")
NUMBERS = (0, 1, 2, -1, 2**31, 2**63 - 1, -(2**63))


def varied(random: Random, value: Any, key: str = "") -> Any:
    """`value` with some of its words, times and numbers replaced, and fields added."""
    if isinstance(value, dict):
        more = {"epoch": 3, "mood": "good"} if random.random() < 0.2 else {}
        return {name: varied(random, item, name) for name, item in value.items()} | more
    if isinstance(value, list):
        return [varied(random, item, key) for item in value]
    if random.random() < 0.6 or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return random.choice(TIMES if key.endswith("Time") or key == "time" else WORDS)
    return random.choice(NUMBERS) if isinstance(value, int) else value


def odd_statuses() -> st.SearchStrategy[Raw]:
    """Statuses of real lives with words, times and numbers of nobody knows which version."""
    lives = statuses()
    return st.integers(0, 2**32).map(lambda seed: varied(Random(seed), lives[seed % len(lives)]))


@given(status=odd_statuses(), later=st.integers(0, 10**6))
def test_any_status_is_read_and_decided_upon_and_keeps_its_words(status: Raw, later: int) -> None:
    """Red where a field of another version is dropped."""
    world = World(a_raw_job(status=status))
    job = world.job
    assert holds(written(job.status), status)
    world.pass_time(later)
    decision = world.decide()
    if decision.status is None:
        return
    kept = json.loads(json.dumps(written(decision.status)))
    foreign = [entry for entry in status.get("conditions", []) if entry["type"] not in set(ConditionType)]
    assert [entry for entry in kept.get("conditions", []) if entry["type"] not in set(ConditionType)] == foreign
    ended_ = [attempt for attempt in status.get("attempts", []) if "endTime" in attempt]
    assert [attempt.get("verdict") for attempt in kept.get("attempts", [])][: len(ended_)] == [
        attempt.get("verdict") for attempt in ended_
    ]
    assert {key: kept.get(key) for key in ("epoch", "mood")} == {key: status.get(key) for key in ("epoch", "mood")}


@given(status=odd_statuses(), code=st.sampled_from([0, 1, 80, 137]))
def test_any_status_meets_any_end_of_a_pod(status: Raw, code: int) -> None:
    world = a_running_world()
    world.raw_job["status"] = status
    world.put(ended(world.pod(0), code))
    for _ in range(3):
        world.step()
        world.pass_time(100)
