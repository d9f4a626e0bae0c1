"""The requests of jobs that begin, without an operator: what is left of it if it decided and watched for nothing.

Each job is POSTed as one that another controller manages, so that the operator keeps out. Then go its status, and once
that is written Service, Secret, pods and Event: all serialised beforehand, and in the operator's order.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from benchmarks.operator_world import IMAGE, NAMESPACE, OWNER, UNKNOWN_UID, World, manifest, pod_bodies
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import Observed, job_facts
from disttrain_operator.events import event_manifest
from disttrain_operator.plan.desired import Site, secret, service
from disttrain_operator.reconcile import status_body
from disttrain_operator.snapshot import core_collection, job_collection

_UNKNOWN_VERSION = "999999999"
_OTHERS = "benchmark.example/nobody"

Request = tuple[str, bytes]


@dataclass(frozen=True)
class JobRequests:
    """What is asked for one job. Bodies name the job by UNKNOWN_UID and _UNKNOWN_VERSION until it has its own."""

    job: bytes
    status: Request
    support: list[Request]
    pods: list[Request]
    events: list[Request]


def job_requests(name: str, replicas: int, owner_uid: str) -> JobRequests:
    """All bodies of one job."""
    raw = manifest(name, replicas)
    raw["metadata"] |= {"uid": UNKNOWN_UID, "resourceVersion": _UNKNOWN_VERSION}
    job, now, site = job_facts(raw), datetime.now(UTC), Site(trainer_image=IMAGE, token="token")
    decision = decide(job, Observed(), now)
    if decision.status is None:
        raise AssertionError("a new job begins with a status")
    events = [event_manifest(job, _UNKNOWN_VERSION, event, now) for event in decision.events]
    return JobRequests(
        job=orjson.dumps(manifest(name, replicas, managed_by=_OTHERS)),
        status=(f"{job_collection(NAMESPACE)}/{name}/status", orjson.dumps(status_body(job, decision.status))),
        support=[_post("services", name, service(job, site)), _post("secrets", name, secret(job, site))],
        pods=[(core_collection("pods", NAMESPACE), body) for body in pod_bodies(name, replicas, owner_uid)],
        events=[_post("events", f"{name}.{number}", event) for number, event in enumerate(events)],
    )


def _post(plural: str, name: str, body: dict[str, Any]) -> Request:
    # Under the job's own uid: what an earlier job of this name had may still be there.
    body["metadata"]["name"] = f"{name}-{UNKNOWN_UID}"
    return core_collection(plural, NAMESPACE), orjson.dumps(body)


async def requests_alone(there: World, jobs: Sequence[tuple[str, int]]) -> float:
    """Seconds from the POST of these (name, replicas) until their pods are there."""
    owner = await there.client.get(f"{core_collection('configmaps', NAMESPACE)}/{OWNER}")
    wanted = [job_requests(name, replicas, owner["metadata"]["uid"]) for name, replicas in jobs]

    async def begin(requests: JobRequests) -> None:
        made = (await there.client.create(job_collection(NAMESPACE), requests.job))["metadata"]

        def of_this_job(body: bytes) -> bytes:
            named = body.replace(UNKNOWN_UID.encode(), made["uid"].encode())
            return named.replace(_UNKNOWN_VERSION.encode(), made["resourceVersion"].encode())

        path, body = requests.status
        await there.client.replace(path, of_this_job(body))
        for together in (requests.support + requests.pods, requests.events):
            await asyncio.gather(*(there.client.create(path, of_this_job(body)) for path, body in together))

    async with there.all_created(sum(replicas for _, replicas in jobs)) as watching:
        began = time.perf_counter()
        await asyncio.gather(*(begin(requests) for requests in wanted))
        return await watching - began
