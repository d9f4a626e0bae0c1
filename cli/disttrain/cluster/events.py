"""Events on an object, for those who may read them."""

from typing import TYPE_CHECKING, Any

from disttrain.cluster.api import ApiError
from disttrain.cluster.remote import RemoteJob

if TYPE_CHECKING:
    from disttrain.client import Client


def readable_events(client: "Client", job: RemoteJob, uid: str | None = None) -> list[Any]:
    """Return the Events on the job, or on an object of its namespace; none where they may not be read.

    What they say of the job stands in its status, too.
    """
    try:
        return client.events(job) if uid is None else client.events_of(job.namespace, uid)
    except ApiError as error:
        if error.status in (401, 403):
            return []
        raise
