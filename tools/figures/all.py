"""All figures by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import cast

from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
FIGURES: Mapping[str, tuple[str, str]] = {
    "all-reduce": ("exchanges", "draw_all_reduce"),
    "compression": ("memory", "draw_sent"),
    "experts": ("exchanges", "draw_experts"),
    "formats": ("memory", "draw_formats"),
    "local-sgd": ("exchanges", "draw_local_sgd"),
    "mesh": ("exchanges", "draw_groups"),
    "offload": ("memory", "draw_offload"),
    "parameter-servers": ("exchanges", "draw_parameter_servers"),
    "pipeline-full": ("schedules", "draw_full"),
    "pipeline-schedules": ("schedules", "draw"),
    "shards": ("memory", "draw_shards"),
    "tensor": ("memory", "draw_tensor"),
}
"""The module and the function that draw it."""


def draw(name: str) -> Figure:
    """Return the figure. Its module is imported here: the pipelines' needs torch, the others do not."""
    module, function = FIGURES[name]
    return cast("Callable[[], Figure]", getattr(import_module(f"tools.figures.{module}"), function))()
