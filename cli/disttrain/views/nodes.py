"""What a pod asks for that no node has, however empty it is: (its spec, nodes) -> sentences. Pure.

The scheduler gives one reason per node, and the same one whether a node is full or too small for ever.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from disttrain.terminal import plain
from disttrain.views.case import Finding
from disttrain_operator.gate.quantities import amounts, spell
from disttrain_operator.gate.read import effective_requests

Raw = Mapping[str, Any]

_SHOWN = 5


def has_no_node(pod: Raw) -> bool:
    """Whether the pod waits for a node."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    return isinstance(spec, Mapping) and status.get("phase") == "Pending" and not spec.get("nodeName")


def no_node_has(pod: Raw, nodes: Sequence[Raw]) -> Finding:
    """Return what no node has of what the pod asks for, and what to do; nothing if that is not so or not known."""
    spec = pod.get("spec") or {}
    try:
        found = [*_labels(spec, nodes), *_amounts(spec, nodes)]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return None, None
    if not nodes or not found:
        return None, None
    sentences, advice = zip(*found, strict=True)
    return f"Waiting alone does not help: {'; '.join(sentences)}.", "; ".join(dict.fromkeys(advice))


def _labels(spec: Raw, nodes: Sequence[Raw]) -> Iterator[tuple[str, str]]:
    labels = [node["metadata"].get("labels") or {} for node in nodes]
    for key, value in (spec.get("nodeSelector") or {}).items():
        known = sorted({str(one[key]) for one in labels if key in one})
        if value in known:
            continue
        others = f", only {plain(', '.join(known[:_SHOWN]))}{' …' if len(known) > _SHOWN else ''}" if known else ""
        yield (
            f"no node has the label {plain(key)}={plain(str(value))}{others}",
            "Correct the `nodeSelector` of the template, or have a node labelled",
        )


def _amounts(spec: Raw, nodes: Sequence[Raw]) -> Iterator[tuple[str, str]]:
    allocatable = [amounts((node.get("status") or {}).get("allocatable")) for node in nodes]
    for resource, wanted in effective_requests(spec):
        most = max(one.get(resource, 0) for one in allocatable)
        if wanted <= most:
            continue
        name, asked = plain(resource), _spelt(resource, wanted)
        if most:
            yield (
                f"a pod asks for {asked} {name}, and the largest node has {_spelt(resource, most)}",
                "Ask for less per pod, and for more pods where that makes up for it, or have larger nodes added",
            )
        else:
            yield (
                f"a pod asks for {asked} {name}, and no node has any",
                f"Run the job where nodes have {name}, have its device plugin installed, or do not ask for it",
            )


def _spelt(resource: str, value: int) -> str:
    """Return a quantity for people: of bytes that are no whole number of Gi, one decimal place."""
    return f"{value / 2**30:.1f}Gi" if value > 2**30 and value % 2**30 else spell(resource, value)
