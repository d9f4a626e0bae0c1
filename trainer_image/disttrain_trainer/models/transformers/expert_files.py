"""How published files hold experts: each matrix of each expert is a tensor, where the library's models stack them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from disttrain_trainer.checkpoint.file_part import FilePart

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class ExpertFiles:
    """The names in a family's files."""

    block: str
    """The part of a layer that has the experts; `mlp` in the library."""
    gate: str
    up: str
    down: str

    def part(self, name: str) -> FilePart:
        """Return what a tensor of a file is in the model."""
        found = re.fullmatch(rf"(model\.layers\.\d+\.){re.escape(self.block)}\.(.+)", name)
        if found is None:
            return FilePart(name)
        layer, rest = found.groups()
        expert = re.fullmatch(r"experts\.(0|[1-9]\d*)\.(\w+)\.weight", rest)
        places = {self.gate: (GATE_UP, 0), self.up: (GATE_UP, 1), self.down: (DOWN, 0)}
        if expert is None or expert[2] not in places:
            return FilePart(f"{layer}mlp.{rest}")
        parameter, column = places[expert[2]]
        return FilePart(f"{layer}mlp.experts.{parameter}", int(expert[1]), column)

    def names(self, parameter: str, experts: int) -> Iterator[tuple[str, ExpertPart | None]]:
        """Yield the tensors that files have of a parameter of the model. experts: of a layer."""
        found = re.fullmatch(r"(model\.layers\.\d+\.)mlp\.(.+)", parameter)
        if found is None:
            yield parameter, None
            return
        layer, rest = found.groups()
        matrices = {f"experts.{GATE_UP}": (self.gate, self.up), f"experts.{DOWN}": (self.down,)}.get(rest)
        if matrices is None:
            yield f"{layer}{self.block}.{rest}", None
            return
        for expert in range(experts):
            for number, matrix in enumerate(matrices):
                name = f"{layer}{self.block}.experts.{expert}.{matrix}.weight"
                yield name, ExpertPart(expert, number, len(matrices))


class ExpertPart(NamedTuple):
    """A matrix of an expert."""

    expert: int
    number: int
    """Which of the `parts` of the expert's row it is."""
    parts: int

    def shape(self, stacked: Sequence[int]) -> tuple[int, ...]:
        """Return its shape. stacked: that of all experts'."""
        _, height, width = stacked
        return height // self.parts, width

    def of(self, read: Sequence[Tensor]) -> Tensor:
        """Return it. read: those of all experts, alone."""
        (stacked,) = read
        return stacked[self.expert].chunk(self.parts)[self.number]
