"""What the caches keep of an object is enough for every decision about it, and bounded."""

import json
import sys
import tracemalloc
from collections.abc import Iterator
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given

from disttrain_api.names import CHECKPOINT_REQUEST
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.facts import KEPT_AT_REST
from disttrain_operator.kept_job import keep, read, same_spec
from disttrain_operator.kept_pod import keep_pod, keep_service, read_pod
from disttrain_operator.kube.sizes import TooMuch
from disttrain_operator.plan.schedulers import release_patch
from disttrain_operator.snapshot import World
from tests.builders import (
    UID,
    a_job,
    a_raw_job,
    a_raw_pod,
    an_init_status,
    awaiting_address,
    ended,
    initializing,
    running,
)
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


@pytest.mark.parametrize(("given", "kept"), [("x" * 100, "x" * 64), (7, None), (["a"], None), (None, None)])
def test_of_annotations_the_request_for_a_checkpoint_is_kept(given: object, kept: str | None) -> None:
    raw = a_raw_job()
    raw["metadata"]["annotations"] = {CHECKPOINT_REQUEST: given, "more": "y" * 1000}
    found = keep(raw)
    assert (found["checkpoint_request"], "annotations" in found["metadata"]) == (kept, False)


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
    """Red where a long spec is not compressed, and where one beyond the bounds is kept."""
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
    killed = ended(pod, 137, reason="OOMKilled")
    limited = {
        **killed,
        "spec": {**killed["spec"], "containers": [{"name": "x", **LIMIT}, {"name": "trainer", **LIMIT}]},
    }
    limited_as_a_whole = {**killed, "spec": {**killed["spec"], **LIMIT, "containers": [{"name": "trainer"}]}}
    bound = a_raw_pod(a_job(), dead=("node1",))
    for raw in (pod, bound, running(pod), ended(pod, 1, message="last words"), killed, limited, limited_as_a_whole):
        raw["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
        raw["spec"] |= {"schedulingGates": [{"name": "disttrain.io/gang"}], "affinity": {"nodeAffinity": {}}}
        kept = keep_pod(raw)
        assert pod_facts(read_pod(kept)) == pod_facts(raw)
        assert keep_pod(kept) is kept


def test_a_kept_pod_waits_for_the_address_of_worker_0_as_the_pod_does() -> None:
    raw = awaiting_address(a_raw_pod(a_job()))
    raw["spec"]["containers"][0] |= {"name": "trainer", **LIMIT, "env": [{"name": "A", "value": "b" * 5_000}]}
    kept = keep_pod(raw)
    facts = pod_facts(read_pod(kept))
    assert facts == pod_facts(raw)
    assert facts.awaits_address is not None
    assert size_of(kept) < 4 * 1024
    raw["spec"]["containers"][0]["startupProbe"] = {"exec": {"command": ["x" * 5_000]}}
    facts = pod_facts(read_pod(keep_pod(raw)))
    assert facts.awaits_address is None


def test_a_kept_pod_tells_which_further_container_has_failed() -> None:
    raw = running(a_raw_pod(a_job()))
    ill = {"terminated": {"exitCode": 2, "reason": "Error", "message": "x" * 9_000 + "\nno route"}}
    raw["status"]["containerStatuses"][:0] = [
        {"name": "proxy", "state": {"running": {}}},
        {"name": "log", "state": ill},
    ]
    kept = keep_pod(raw)
    facts = pod_facts(read_pod(kept))
    assert facts == pod_facts(raw)
    assert facts.failed_beside == "container log failed (exit code 2)"


ENDED: Raw = {"exitCode": 3, "reason": "OOMKilled", "finishedAt": "2026-01-01T12:00:00Z"}
INITIALIZING: dict[str, tuple[list[Raw], str]] = {
    "runs": ([an_init_status("a", {"terminated": {"exitCode": 0}}), an_init_status("b", {"running": {}})], "Pending"),
    "waits": ([an_init_status("a", {"waiting": {"reason": "ErrImagePull", "message": "m" * 5_000}})], "Pending"),
    "has failed": (
        [
            an_init_status("proxy", {"terminated": ENDED}, restarts=2),
            an_init_status("b", {"terminated": {**ENDED, "message": "lost\n" + "x" * 4_000 + "\nlast words"}}),
        ],
        "Failed",
    ),
    "keeps failing": ([an_init_status("proxy", {"waiting": {"reason": "CrashLoopBackOff"}}, last=ENDED)], "Pending"),
    "starts again": ([an_init_status("proxy", {"running": {"startedAt": "2026"}}, restarts=7, last=ENDED)], "Pending"),
    "has started": ([an_init_status("proxy", {"running": {}}, started=True)], "Pending"),
    "was evicted": ([an_init_status("a", {"terminated": {"exitCode": 0}})], "Failed"),
    "was rejected": ([], "Failed"),
    "many": ([an_init_status(f"c{number}", {"terminated": ENDED}) for number in range(100)], "Failed"),
    "too many": (
        [
            *(an_init_status(f"c{number}", {"terminated": {"exitCode": 0}}) for number in range(100)),
            an_init_status("last", {"running": {}}),
        ],
        "Pending",
    ),
}


LIMIT: Raw = {"resources": {"limits": {"memory": "77Mi", "cpu": "4"}, "requests": {"memory": "1Gi"}}}


@pytest.mark.parametrize(("init_containers", "phase"), INITIALIZING.values(), ids=INITIALIZING.keys())
def test_a_kept_pod_has_the_facts_of_its_init_containers(init_containers: list[Raw], phase: str) -> None:
    raw = initializing(a_raw_pod(a_job()), *init_containers, sidecars=("proxy",), phase=phase)
    raw["spec"]["initContainers"] = [{**entry, **LIMIT} for entry in raw["spec"]["initContainers"]]
    kept = keep_pod(raw)
    assert pod_facts(read_pod(kept)) == pod_facts(raw)
    assert len(read_pod(kept)["status"].get("initContainerStatuses", [])) <= 1


def test_of_init_containers_nothing_is_kept_once_the_program_has_begun() -> None:
    raw = running(a_raw_pod(a_job()))
    bare = size_of(keep_pod(raw))
    raw["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}]
    raw["status"]["initContainerStatuses"] = [an_init_status("proxy", {"terminated": ENDED}, restarts=5, last=ENDED)]
    assert size_of(keep_pod(raw)) == bare


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
    last = {"terminated": {"exitCode": 1, "message": long, "reason": long, "finishedAt": long}}
    odd = {"name": long, "image": long, "state": {"terminated": last["terminated"]}, "lastState": last}
    not_begun = {**pod, "spec": {"initContainers": [{"name": long, "restartPolicy": long}] * 1_000}}
    not_begun["status"] = {**pod["status"], "containerStatuses": [], "initContainerStatuses": [odd] * 1_000}
    assert size_of(keep_pod(not_begun)) < 64 * 1024
    pod["status"]["containerStatuses"] *= 1_000
    kept = keep_pod(pod)
    assert size_of(kept) < 64 * 1024
    before, after = pod_facts(pod), pod_facts(read_pod(kept))
    assert before is not None
    assert after is not None
    assert after == before


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
WIDE = {"nodeSelectorTerms": [{"matchExpressions": [{"key": f"k{n}", "operator": "Exists"}]} for n in range(500)]}


def test_the_release_of_a_kept_pod_repeats_what_that_of_the_pod_does() -> None:
    raw = a_raw_pod(a_job())
    raw["spec"] = {
        "schedulingGates": [{"name": "disttrain.io/gang"}, {"name": "x.io/other"}],
        "affinity": {"nodeAffinity": {REQUIRED: WIDE}, "podAffinity": {"x": "y" * 1_000_000}},
    }
    kept = keep_pod(raw)
    assert size_of(kept) < 16 * 1024
    assert release_patch(read_pod(kept), "n", "t") == release_patch(raw, "n", "t")


def test_a_pod_that_our_gate_does_not_hold_keeps_no_affinity() -> None:
    raw = a_raw_pod(a_job())
    bare = size_of(keep_pod(raw))
    raw["spec"] = {
        "schedulingGates": [{"name": "x.io/other"}] * 40_000,
        "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": WIDE["nodeSelectorTerms"] * 48}}},
    }
    assert size_of(keep_pod(raw)) == bare


def test_a_pod_whose_release_would_be_too_long_is_not_kept() -> None:
    """Red without the bound on what its release repeats."""
    raw = a_raw_pod(a_job())
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}] * 24_000
    raw["spec"] = {
        "schedulingGates": [{"name": "disttrain.io/gang"}],
        "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}},
    }
    with pytest.raises(TooMuch, match=r"node affinity have 1,320,\d+ bytes; the operator keeps 262,144 at most"):
        keep_pod(raw)


def test_what_is_read_from_a_pod_takes_no_more_than_is_reserved_for_it() -> None:
    long = "x" * 4096
    pod = ended(a_raw_pod(a_job()), 1, message=long, reason=long)
    pod["status"]["conditions"] = [
        {"type": f"{number:0300}", "status": "True", "reason": "r" * 1_000, "message": long} for number in range(100)
    ]
    kept = keep_pod(pod)
    assert size_of(pod_facts(read_pod(kept)).__dict__) < kept["reserved"]
    assert kept["reserved"] > 200_000, "though it is short when it is compressed"
    assert size_of(kept) < 16 * 1024


def test_a_pod_of_which_too_much_would_be_left_is_not_kept() -> None:
    """Red without the bound on what is kept of a pod."""
    random = Random(1)
    pod = a_raw_pod(a_job())
    pod["status"]["conditions"] = [{"type": random.randbytes(150).hex(), "reason": "r", "status": "True"}] * 100
    assert size_of(keep_pod(pod)) < 64 * 1024
    pod["status"]["conditions"] = [
        {"type": random.randbytes(500).hex(), "reason": random.randbytes(500).hex()} for _ in range(100)
    ]
    with pytest.raises(TooMuch, match="bytes would be left of it, and the operator keeps 65,536 at most"):
        keep_pod(pod)


def test_a_service_is_a_name() -> None:
    raw = {"metadata": a_raw_pod(a_job())["metadata"] | {"annotations": {"a": "x" * 200_000}}, "spec": {"ports": []}}
    kept = keep_service(raw)
    assert keep_service(kept) == kept
    assert kept["metadata"].keys() == {"name", "namespace", "uid", "ownerReferences"}


def test_of_a_jobs_labels_the_one_that_names_its_queue_is_kept() -> None:
    raw = a_raw_job()
    raw["metadata"] |= {
        "labels": {"kueue.x-k8s.io/queue-name": "q", **{f"label-{number:06}": "" for number in range(66_000)}},
        "ownerReferences": [{"uid": str(number)} for number in range(12_000)],
        "finalizers": [f"x.io/f{number}" for number in range(40_000)],
    }
    kept = keep(raw)
    assert size_of(kept) < 5_000
    assert kept["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert read(kept).problems == ()


def test_a_job_that_would_take_more_than_a_job_may_is_not_kept() -> None:
    random = Random(1).randbytes(600_000).hex()
    raw = a_raw_job(status={"mood": random[:1_000_000]}, workers={"template": {"metadata": {"annotations": {}}}})
    raw["spec"]["workers"]["template"]["metadata"]["annotations"]["a"] = random[-1_000_000:]
    with pytest.raises(TooMuch, match="bytes would be left of it, compressed, and the operator keeps 1,048,576"):
        keep(raw)
