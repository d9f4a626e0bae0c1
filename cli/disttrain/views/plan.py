"""Output of `disttrain plan`: a plan -> text. Pure."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from disttrain.planning.objects import PlannedObject
from disttrain.planning.rank import RankMemory
from disttrain_api.memory import in_words
from disttrain_api.mesh import Mesh

OBJECT_HEADINGS = ("KIND", "COUNT", "NAME", "WHAT")
MEMORY_HEADINGS = ("MEMORY", "BYTES", "")
_PARTS = (
    ("parameters", "parameters", ""),
    ("buffers", "buffers", ""),
    ("gradients", "gradients", ""),
    ("optimizer state", "optimizer_state", ""),
    ("activations", "activations", "the most that a forward pass adds"),
    ("while it is built", "building", "the whole model, before it is cut"),
    ("peak of a step", "peak", "the most that is there at once: gradients come as activations go"),
    ("in host memory", "in_host", "of the peak, where ranks have GPUs: what is put together for the servers"),
)
_BESIDE = "The allocator's gaps, the libraries of a GPU (about 1 GiB) and buffers of collectives come on top."


def object_row(one: PlannedObject) -> list[str]:
    """Return the cells of an object."""
    return [one.kind, str(one.count), one.name, one.what]


def memory_rows(memory: RankMemory) -> list[list[str]]:
    """Return a row for each part that is known."""
    sizes = asdict(memory)
    rows = [[name, in_words(sizes[key]), note] for name, key, note in _PARTS if sizes[key] is not None]
    if memory.least is not None:
        rows.append(["at least", in_words(memory.least), "counted from the manifest"])
    return rows


def remarks(memory: RankMemory) -> Iterator[str]:
    """Yield what the numbers do not say."""
    if memory.unknown is not None:
        what = "Activations and peak are" if memory.parameters is not None else "Memory is"
        yield f"{what} not known: {memory.unknown}."
    if memory.assumed is not None:
        yield f"Assumed: {memory.assumed}."
    if memory.needed is not None:
        yield _BESIDE


def as_data(objects: list[PlannedObject], mesh: Mesh | None, ranks: int, memory: RankMemory) -> dict[str, Any]:
    """Return the plan as plain data, for JSON."""
    return {
        "objects": [asdict(one) for one in objects],
        "ranks": ranks,
        "mesh": None if mesh is None else asdict(mesh),
        "memory": {key: value for key, value in asdict(memory).items() if key != "work"},
    }
