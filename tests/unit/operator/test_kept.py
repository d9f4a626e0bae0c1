"""What the caches keep of an object is enough for every decision about it, and bounded."""

import json
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given

from disttrain_operator.decide.observed import job_facts
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.kept_job import keep, read, same_spec
from disttrain_operator.kept_pod import keep_pod
from disttrain_operator.snapshot import KEPT_AT_REST, World
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, ended, running
from tests.unit.decide.test_other_versions import odd_statuses, statuses

Raw = dict[str, Any]


@given(odd_statuses())
def test_a_kept_job_is_the_job(status: Raw) -> None:
    raw = a_raw_job(status=status, runPolicy={"schedulingPolicy": {"gangScheduler": "Gate"}})
    raw["metadata"]["managedFields"] = [{"fieldsV1": {"f:spec": {}}}]
    kept = keep(raw)
    assert read(kept) == job_facts(raw)
    assert keep(kept) is kept
    assert (kept["phase"], kept["gang"]) == (status.get("phase"), "Gate")
    assert "managedFields" not in kept["metadata"]


@pytest.mark.parametrize("changes", [{}, {"workers": {"replicas": "two"}}, {"managedBy": "other/one"}])
def test_a_kept_job_has_the_same_problems(changes: Raw) -> None:
    raw = a_raw_job(**changes)
    assert read(keep(raw)) == job_facts(raw)


def test_the_words_for_quick_looks_follow_the_status() -> None:
    found = [
        (keep(a_raw_job(status=status))["begun"], keep(a_raw_job(status=status))["rests"]) for status in statuses()
    ]
    #        new,            runs,          restarted,     finished,      suspended
    assert found == [(False, False), (True, False), (True, False), (False, True), (False, True)]


def size_of(value: Any) -> int:
    """Bytes of a value and of all in it."""
    seen: set[int] = set()

    def parts(value: Any) -> Iterator[Any]:
        if id(value) in seen:
            return
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            for pair in value.items():
                for item in pair:
                    yield from parts(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from parts(item)

    return sum(map(sys.getsizeof, parts(value)))


HEAVY: dict[str, Raw] = {
    "lists": {"training": {"model": {"config": {"x": [[] for _ in range(350_000)]}}}},
    "keys": {"training": {"model": {"config": {f"k{number}": 1 for number in range(100_000)}}}},
    "depth": {"training": {"model": {"config": json.loads('{"a":' * 900 + "1" + "}" * 900)}}},
    "text": {"workers": {"template": {"metadata": {"annotations": {"k": "x" * 900_000}}}}},
    "annotations": {"workers": {"template": {"metadata": {"annotations": {f"k{n}": "" for n in range(40_000)}}}}},
    "anything": {"surprise": [{"a": [number]} for number in range(100_000)]},
}


@pytest.mark.parametrize("changes", HEAVY.values(), ids=HEAVY.keys())
def test_a_job_takes_no_more_memory_than_its_text(changes: Raw) -> None:
    raw = a_raw_job(**changes)
    kept = keep(raw)
    assert size_of(kept) < 500_000
    assert read(kept).problems == job_facts(raw).problems


def test_another_label_that_names_the_queue_is_another_spec() -> None:
    one, other, same = a_raw_job(), a_raw_job(), a_raw_job()
    other["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    same["metadata"]["labels"] = {"team": "vision"}
    assert same_spec(keep(one), keep(same))
    assert not same_spec(keep(one), keep(other))
    spec = read(keep(other), former=None).spec
    assert spec is not None
    assert spec.run_policy.scheduling_policy.queue_name == "research"


def test_a_small_job_takes_little_memory() -> None:
    raw = a_raw_job(status=statuses()[1])
    keep(raw)
    tracemalloc.start()
    try:
        kept = [keep(raw) for _ in range(100)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text = len(orjson.dumps(raw))
    assert taken / len(kept) < 2 * text + 1_000


def test_a_managed_job_stays_managed_whatever_its_spec_holds() -> None:
    raw = a_raw_job(managedBy="other/one", **HEAVY["lists"])
    assert read(keep(raw)).managed_by == "other/one"


def test_a_change_of_a_refused_spec_is_a_change() -> None:
    one, other = keep(a_raw_job(**HEAVY["lists"])), keep(a_raw_job(**HEAVY["depth"]))
    assert not same_spec(one, other)
    assert not same_spec(one, keep(a_raw_job()))
    assert same_spec(one, keep(a_raw_job(**HEAVY["lists"], status={"attempt": 0})))


def test_of_jobs_that_rest_few_specs_are_kept_as_objects() -> None:
    world = World()
    finished = statuses()[3]
    for number in range(KEPT_AT_REST * 2):
        raw = a_raw_job(status=finished)
        raw["metadata"]["uid"] = f"uid-{number}"
        world.jobs.observe(raw)
        assert world.job(f"uid-{number}") is not None
    world.jobs.observe(a_raw_job(status=statuses()[1]))
    for number in range(KEPT_AT_REST):
        assert world.job(f"uid-{number}") is not None
        assert world.job(UID) is not None
    assert len(world._facts) == KEPT_AT_REST + 1
    assert UID in world._facts


# --- pods ---


def test_a_kept_pod_has_the_facts_of_the_pod() -> None:
    pod = a_raw_pod(a_job())
    for raw in (pod, running(pod), ended(pod, 1, message="last words"), ended(pod, 137, reason="OOMKilled")):
        raw["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
        raw["spec"] |= {"schedulingGates": [{"name": "disttrain.io/gang"}], "affinity": {"nodeAffinity": {}}}
        kept = keep_pod(raw)
        assert pod_facts(kept) == pod_facts(raw)
        assert keep_pod(kept) == kept


def test_a_pod_with_a_status_of_any_size_is_kept_in_bounded_size() -> None:
    long = "x" * 1_000_000
    pod = ended(a_raw_pod(a_job()), 1, message=long, reason=long)
    pod["metadata"]["labels"] |= {f"{number}": "" for number in range(10_000)}
    pod["metadata"]["annotations"] = {"disttrain.io/released-at": long}
    pod["metadata"]["ownerReferences"] = [{"uid": str(number)} for number in range(1_000)]
    pod["status"] |= {
        "message": long,
        "conditions": [{"type": f"t{number}", "status": "True", "message": long} for number in range(1_000)],
        "initContainerStatuses": [{"name": f"c{number}", "image": long} for number in range(1_000)],
    }
    pod["status"]["containerStatuses"] *= 1_000
    kept = keep_pod(pod)
    assert size_of(kept) < 1_500_000
    before, after = pod_facts(pod), pod_facts(kept)
    assert before is not None
    assert after is not None
    assert (after.exit, after.report) == (before.exit, before.report)
    assert zlib.crc32(json.dumps(kept).encode())
