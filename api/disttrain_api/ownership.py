"""Find the job that controls an object, by its owner reference, which is written and read nowhere else.

Labels can be copied by anybody who makes an object, also in another namespace. An owner reference can be written by
anybody who makes an object, too, so it counts in the owner's own namespace alone: there, who may make pods may do what
the job does.
"""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import API_VERSION, GROUP, KIND


def owner_reference(job_name: str, uid: str) -> dict[str, Any]:
    """Return the reference of a child to its job. Without blockOwnerDeletion, which asks for a right on finalizers."""
    return {"apiVersion": API_VERSION, "kind": KIND, "name": job_name, "uid": uid, "controller": True}


def controller(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference of the object's controller; None where it has none."""
    owners = metadata.get("ownerReferences") or ()
    # The API server lets an object have one controller at most.
    return next((owner for owner in owners if owner.get("controller") is True), None)


def controlling_job(metadata: Mapping[str, Any]) -> str | None:
    """Return the uid of the job that controls the object, of any version of the API; None where no job does.

    The job counts in the object's own namespace only: the caller compares it.
    """
    owner = controller(metadata)
    if owner is None or owner.get("kind") != KIND or owner.get("apiVersion", "").partition("/")[0] != GROUP:
        return None
    uid: str | None = owner.get("uid")
    return uid
