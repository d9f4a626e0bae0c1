"""Objects of a cluster in which every string that is no identity can be anything."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.builders import UID, a_job, a_raw_job, a_raw_pod, ended, running, waiting
from tests.unit.api.test_escape import WITHOUT_A_SHAPE
from tests.unit.cli.fake_api import JOBS, TIME, FakeApi, Raw, a_condition

EVIL = "\x1b]52;c;eA==\x07\x1b[2J\x1b[8m\x7f\x9b31m\u202e[bold]x[/bold]\u2066\x00\r\n\x85y\u2028"
any_text = st.text(st.characters(exclude_categories=("Cs",))) | st.just(EVIL)

Place = tuple[str | int, ...]


def bad_in(text: str) -> set[str]:
    return (WITHOUT_A_SHAPE - {"\t", "\n"}) & set(text)


def a_full_job(state: str) -> Raw:
    verdict = {"reason": "OOMKilled", "message": "said", "class": "OutOfMemory", "rule": "a", "pod": "p", "node": "n"}
    verdict |= {"rank": 0, "exitCode": 1, "log": "line", "action": "Restart", "role": "worker"}
    attempt = {"number": 1, "startTime": TIME, "runningTime": TIME, "endTime": TIME, "verdict": verdict}
    progress = {"step": 3, "totalSteps": 100, "loss": 0.5, "samplesPerSecond": 7.0, "updateTime": TIME}
    progress |= {"metrics": [{"name": "accuracy", "value": 0.5}], "evaluationFailure": "it failed"}
    status = {
        "phase": state,
        "attempt": 1,
        "worldSize": 2,
        "mesh": "dp2",
        "ready": "1/2",
        "restarts": 1,
        "startTime": TIME,
        "completionTime": TIME,
        "attempts": [attempt],
        "progress": progress,
        "checkpoint": {"step": 1, "path": "/here", "time": TIME},
        "goodput": {"since": TIME, "updateTime": TIME, "state": "Training", "spent": [{"state": "a", "seconds": 5}]},
        "replacements": [{"pod": "p", "reason": "Evicted", "time": TIME, "attempt": 1}],
        "conditions": [
            a_condition("Complete", "True" if state == "Succeeded" else "False"),
            a_condition("Failed", "True" if state == "Failed" else "False"),
            a_condition("Suspended", "True" if state == "Suspended" else "False"),
            a_condition("Running", "True" if state == "Running" else "False"),
            a_condition("Finished", "True" if state in ("Failed", "Succeeded") else "False"),
        ],
    }
    return a_raw_job(status=status, runPolicy={"restartPolicy": "Always"}, suspend=state == "Suspended")


def a_world(state: str) -> dict[str, Raw]:
    """Objects by what they are put under."""
    job = a_job()
    first = ended(a_raw_pod(job, index=0), 1, reason="OOMKilled", message="said") if state == "Failed" else None
    first = first or running(a_raw_pod(job, index=0))
    second = waiting(a_raw_pod(job, index=1), "ImagePullBackOff", "no such image")
    about = {"uid": UID, "name": "digits", "kind": "DistTrainingJob"}
    event = {"involvedObject": about, "reason": "Because", "message": "it is so", "type": "Warning", "count": 2}
    of_pod = {"involvedObject": about | {"uid": second["metadata"]["uid"], "kind": "Pod"}, "reason": "FailedScheduling"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": "8"}}
    lease = {"metadata": {"name": "disttrain-operator"}, "spec": {"holderIdentity": "one", "renewTime": TIME}}
    return {
        JOBS.format("default"): a_full_job(state),
        "/api/v1/namespaces/default/pods": first,
        "/api/v1/namespaces/default/pods#2": second,
        "/api/v1/namespaces/default/events": event | {"metadata": {"name": "e"}, "lastTimestamp": TIME},
        "/api/v1/namespaces/default/events#2": of_pod | {"metadata": {"name": "f"}, "message": "no room"},
        "/api/v1/nodes": {"metadata": {"name": "n"}, "status": ready},
        "/apis/coordination.k8s.io/v1/namespaces/default/leases": lease,
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": {"status": {"allowed": True}},
        "/version": {"gitVersion": "v1.34.4", "major": "1", "minor": "34"},
        "/apis/disttrain.io": {"versions": [{"version": "v1alpha1"}]},
    }


def is_identity(path: Place) -> bool:
    """Whether a string says which object it is, or where a job stands: another one is a world without it."""
    last = path[-1]
    return (
        (path[1] == "metadata" and last != "creationTimestamp")
        or last == "uid"
        or ("conditions" in path and last in ("type", "status"))
        or ("containerStatuses" in path and last == "name")
    )


def strings(value: Any, path: Place = ()) -> Iterator[Place]:
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(item, (*path, key))


def poisoned(world: dict[str, Raw], text: str, paths: list[Place]) -> dict[str, Raw]:
    world = copy.deepcopy(world)
    for path in paths:
        target: Any = world
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = text
    return world


def put(api: FakeApi, world: dict[str, Raw], line: str) -> None:
    for store in (api.objects, api.logs, api.answers):
        store.clear()
    for where, raw in world.items():
        if "metadata" in raw:
            api.put(where.partition("#")[0], raw)
        else:
            api.answers[where] = (200, raw)
    for name in ("", "#2"):
        pod = world[f"/api/v1/namespaces/default/pods{name}"]["metadata"]["name"]
        api.logs[pod] = [f"{TIME} [rank 0] {line}", line, f"{TIME} {line}"]
