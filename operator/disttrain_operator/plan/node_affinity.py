"""Required node affinities of pods that become narrower: only some nodes remain, or all but some."""

from collections.abc import Mapping, Sequence
from typing import Any

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def narrowed(node_affinity: Mapping[str, Any], operator: str, nodes: Sequence[str]) -> dict[str, Any]:
    """Return a node affinity each of whose required terms also asks this of these nodes. operator: In, of one node, or
    NotIn."""
    terms = (node_affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or []
    # A field selector's list may hold one value.
    fields = [{"key": "metadata.name", "operator": operator, "values": [node]} for node in nodes]
    # An empty term matches no node, and would match some with another line.
    lines = [{**term, "matchFields": [*(term.get("matchFields") or []), *fields]} if term else term for term in terms]
    return {**node_affinity, REQUIRED: {"nodeSelectorTerms": lines or [{"matchFields": fields}]}}
