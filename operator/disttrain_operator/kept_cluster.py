"""Entries of the gate's caches for nodes and all pods of the cluster: the facts that the gate reads, bounded.

What a pod takes of its node counts whatever else stands in it. What it asks of a node is kept while it waits, and only
as far as it is no longer than `MAX_KEPT`; a pod that has ended takes nothing and asks for nothing.
"""

from collections.abc import Container
from dataclasses import replace

from disttrain_operator.gate.read import ClusterPod, cluster_pod, node_facts
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.sizes import TooMuch, size_of

MAX_KEPT = 64 * 1024
"""Bytes of one pod."""
MAX_KEPT_OF_A_NODE = 256 * 1024
_MAX_NAME = 256


def trim_node(raw: Raw) -> Raw:
    """A node as the gate sees it."""
    if "node" in raw:
        return raw
    kept = {"metadata": _identity(raw), "node": node_facts(raw)}
    size = size_of(kept)
    if size > MAX_KEPT_OF_A_NODE:
        why = f"{size:,} bytes would be left of it, and the gate keeps {MAX_KEPT_OF_A_NODE:,} of a node at most"
        raise TooMuch(why, "Give it fewer or shorter labels and taints")
    return kept


def trim_cluster_pod(raw: Raw, offered: Container[str] = ()) -> Raw:
    """A pod as the gate sees it. offered: the resources that nodes have."""
    if "pod" in raw:
        return raw
    return {"metadata": _identity(raw), "pod": _bounded(cluster_pod(raw, offered))}


def _bounded(pod: ClusterPod) -> ClusterPod:
    if pod.finished:
        pod = replace(pod, requests=(), needs=None, reserved=None)
    if not all(map(_is_name, (pod.node, pod.job, pod.attempt, *pod.identity))):
        # Nothing has such a name: it runs nowhere and is no job's.
        pod = replace(pod, node=pod.node if _is_name(pod.node) else None, job=None, attempt="", identity=("", 0))
    size = size_of(pod)
    if size <= MAX_KEPT:
        return pod
    problem = f"what it asks of a node takes {size:,} bytes; the gate keeps {MAX_KEPT:,} of a pod at most"
    pod = replace(pod, needs=None, problem=problem)
    return pod if size_of(pod) <= MAX_KEPT else replace(pod, requests=())


def _is_name(value: object) -> bool:
    return not isinstance(value, str) or len(value) <= _MAX_NAME


def _identity(raw: Raw) -> Raw:
    return {key: raw["metadata"].get(key) for key in ("name", "namespace", "uid", "resourceVersion")}
