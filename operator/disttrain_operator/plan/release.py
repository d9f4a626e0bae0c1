"""A pod that the gate holds, and the node it may go to -> the patch that lets it go."""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import GANG_GATE, Annotation

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def release_patch(pod: Mapping[str, Any], node: str, at: str) -> dict[str, Any]:
    """A merge patch. It may be repeated: uid and gates decide whom it meets.

    Of a gated pod the API server lets required node affinity become narrower, never wider: each term keeps its lines.
    """
    spec = pod["spec"]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    narrowed = [{**term, "matchFields": [*(term.get("matchFields") or []), field]} for term in terms]
    gates = [gate for gate in spec.get("schedulingGates") or [] if gate.get("name") != GANG_GATE]
    return {
        "metadata": {
            "uid": pod["metadata"]["uid"],
            "annotations": {Annotation.RELEASED_AT: at, Annotation.RESERVED_NODE: node},
        },
        "spec": {
            "schedulingGates": gates,
            "affinity": {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": narrowed}}},
        },
    }
