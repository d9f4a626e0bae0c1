"""Kubernetes Events on a job. What an Event says stands in the status, too: losing one loses nothing."""

import hashlib
import logging
from datetime import datetime

from disttrain_api.escape import escaped
from disttrain_api.names import API_VERSION, KIND
from disttrain_operator.decide.decision import Event
from disttrain_operator.decide.observed import Job
from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import Conflict, KubeError
from disttrain_operator.snapshot import Key, core_collection

logger = logging.getLogger(__name__)

COMPONENT = "disttrain-operator"


async def post_event(client: Client, job: Job | Key, version: str, event: Event, now: datetime) -> None:
    """Post one Event; `version` is the resourceVersion of the status that it speaks of. Never raises a KubeError."""
    try:
        await client.create(core_collection("events", job.namespace), event_manifest(job, version, event, now))
    except Conflict:
        pass  # a repeated POST: it is there
    except KubeError as error:
        logger.info("%s/%s: event %s was not posted: %s", job.namespace, job.name, event.reason, error)


def event_manifest(job: Job | Key, version: str, event: Event, now: datetime) -> Raw:
    """The Event, under a name that a repeated POST meets again."""
    content = f"{job.uid} {version} {event.reason} {event.message}".encode(errors="replace")
    digest = hashlib.sha256(content).hexdigest()[:16]
    time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": version,
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": escaped(event.reason),
        # The API server refuses longer ones.
        "message": escaped(event.message)[:1024],
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }
