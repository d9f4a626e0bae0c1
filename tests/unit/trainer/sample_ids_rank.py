"""A rank of cases.py that writes down which samples its steps compute, into a file beside each case's checkpoints."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.strategies.synchronous import Batch, Synchronous
from tests.unit.trainer import cases

Row = tuple[list[int], list[int] | None]
"""Inputs of a sample, and where the document of each of its tokens begins."""


def rows_of(microbatch: Microbatch) -> list[Row]:
    """The samples of a microbatch that are not padding."""
    starts = [None] * len(microbatch.inputs) if microbatch.starts is None else microbatch.starts.tolist()
    found = zip(microbatch.weights.tolist(), microbatch.inputs.tolist(), starts, strict=True)
    return [(inputs, begins) for weight, inputs, begins in found if weight]


def watch(folder: Path) -> None:
    """Write down what is computed from now on."""
    original = Synchronous.compute_gradients

    def compute_gradients(self: Synchronous, batch: Batch, weight: float, samples: float) -> Tensor:
        world = self.world
        line = {"step": self.state.step, "replica": world.replica, "passes": list(map(rows_of, batch.microbatches))}
        with (folder / f"samples-{world.size}-{world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return original(self, batch, weight, samples)

    Synchronous.compute_gradients = compute_gradients  # type: ignore[method-assign]


def global_batches(folder: Path) -> Iterator[list[Row]]:
    """Yield the samples that all ranks together computed in each step of a case, in order.

    Fails where a step was computed twice, or ranks that share layers had other samples.
    """
    steps: dict[int, dict[int, list[list[Row]]]] = {}
    worlds: dict[int, str] = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        world = path.stem.split("-")[1]
        for line in map(json.loads, path.read_text().splitlines()):
            assert worlds.setdefault(line["step"], world) == world, f"step {line['step']} was computed twice"
            replicas = steps.setdefault(line["step"], {})
            assert replicas.setdefault(line["replica"], line["passes"]) == line["passes"]
    assert sorted(steps) == list(range(len(steps)))
    for _, replicas in sorted(steps.items()):
        slots: Iterable[Any] = zip(*(passes for _, passes in sorted(replicas.items())), strict=True)
        yield list(chain.from_iterable(chain.from_iterable(slots)))


def main() -> None:
    run_case = cases.run_case

    def watched(folder: Path, *arguments: Any) -> None:
        original = Synchronous.compute_gradients
        folder.mkdir(exist_ok=True)
        watch(folder)
        run_case(folder, *arguments)
        Synchronous.compute_gradients = original  # type: ignore[method-assign]

    cases.run_case = watched
    cases.main()


if __name__ == "__main__":
    main()
