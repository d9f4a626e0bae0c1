"""Says whether the examples train to the same losses as before, to the last bit.

    python -m tools.same_losses OTHER_CHECKOUT [EXAMPLE …]
    python -m tools.same_losses --record FILE [EXAMPLE …]
    python -m tools.same_losses --check FILE [EXAMPLE …]

After a change that should move no number, OTHER_CHECKOUT is a worktree of the commit before; FILE is a record of the
losses that an earlier commit had on this machine. An example whose losses differ runs once more, from OTHER_CHECKOUT or
for a record from here: where these two differ as well, its losses follow from chance, as those of workers that do not
wait for each other. Losses are a function of torch and of the processor, too: a record of others is refused.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("api", "operator", "trainer_image", "cli")
# These figures of every line; the others of a line are times.
COMPARED = ("step", "loss_metrics/global_avg_loss", "grad_norm", "lr", "validation_metrics/global_avg_loss")
# What trains nothing here, or needs more than this machine has.
LEFT_OUT = {"collectives", "corpus", "document-mask", "torchrun-gpu"}

Figures = list[tuple[float | None, ...]]


@dataclass(frozen=True)
class Machine:
    """What losses depend on beside the code."""

    torch: str
    processor: str
    """Its model."""


def main(arguments: Sequence[str]) -> int:
    """Print a line per example. Returns 1 where losses differ that should not, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.same_losses", usage=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    if given.record is not None:
        return record(given.record, given.names or examples(REPOSITORY))
    if given.check is not None:
        known = recorded(json.loads(given.check.read_text()), this_machine(), str(given.check))
        missing = sorted(set(given.names) - known.keys())
        if missing:
            sys.exit(f"{given.check} has no losses of {', '.join(missing)}: record them anew")
        return answers(given.names or sorted(known), lambda name: compare_with(known[name], name))
    if not given.names:
        parser.error("name another checkout, or give --record or --check with a file")
    former = Path(given.names[0]).resolve()
    return answers(given.names[1:] or examples(former), lambda name: compare(former, name))


def answers(names: Sequence[str], answer_of: Callable[[str], str]) -> int:
    """Print what is found of each example. Returns 1 where one differs, else 0."""
    differ = 0
    for name in names:
        answer = answer_of(name)
        differ += answer == "differs"
        print(f"{name}: {answer}", flush=True)
    return min(differ, 1)


def compare(former: Path, name: str) -> str:
    """Return "same", "differs" or "differs by chance"."""
    before = figures(former, name)
    return verdict(before, figures(REPOSITORY, name), lambda: figures(former, name) == before)


def compare_with(before: Figures, name: str) -> str:
    """Return the same of what was recorded."""
    now = figures(REPOSITORY, name)
    return verdict(before, now, lambda: figures(REPOSITORY, name) == now)


def verdict(before: Figures, now: Figures, again: Callable[[], bool]) -> str:
    """Return "same", "differs" or "differs by chance". again: whether one more run has the same losses as the last."""
    if now == before:
        return f"same ({len(before)} lines)"
    return "differs" if again() else "differs by chance"


def record(file: Path, names: Sequence[str]) -> int:
    """Write the losses of these examples, and what they depend on, into a file. Returns 0."""
    found: dict[str, Figures] = {}
    for name in names:
        found[name] = figures(REPOSITORY, name)
        print(f"{name}: {len(found[name])} lines", flush=True)
    file.write_text(json.dumps(record_of(this_machine(), found), indent=1) + "\n")
    return 0


def record_of(machine: Machine, found: dict[str, Figures]) -> dict[str, Any]:
    """Return what a record holds, for JSON."""
    return {"machine": asdict(machine), "examples": found}


def recorded(record: dict[str, Any], machine: Machine, place: str) -> dict[str, Figures]:
    """Return the losses of each example of a record. Ends the program where it is of another torch or processor."""
    of = Machine(**record["machine"])
    for what, there, here in (("torch", of.torch, machine.torch), ("processor", of.processor, machine.processor)):
        if there != here:
            sys.exit(
                f"{place} was recorded with the {what} {there}, and here is {here}: losses differ; record them anew"
            )
    return {name: [tuple(line) for line in lines] for name, lines in record["examples"].items()}


def this_machine() -> Machine:
    """Return what losses depend on here."""
    return Machine(version("torch"), processor_of(Path("/proc/cpuinfo").read_text()) or platform.processor())


def processor_of(cpuinfo: str) -> str | None:
    """Return the model that /proc/cpuinfo names first; None where it names none, as on ARM."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), None)


def examples(checkout: Path) -> list[str]:
    """Return the names of a checkout's examples that train here."""
    folder = checkout / "examples"
    found = (path.relative_to(folder) for pattern in ("*.yaml", "tasks/*.yaml") for path in folder.glob(pattern))
    return sorted({path.with_suffix("").as_posix() for path in found} - LEFT_OUT)


def figures(checkout: Path, name: str) -> Figures:
    """Run an example with a checkout's code and return what its metrics hold. Raises CalledProcessError."""
    paths = os.pathsep.join([str(checkout), *(str(checkout / package) for package in PACKAGES)])
    command = [sys.executable, "-m", "disttrain.main", "run", str(checkout / "examples" / f"{name}.yaml")]
    with tempfile.TemporaryDirectory() as folder:
        # User code of examples is looked up from the working folder.
        Path(folder, "examples").symlink_to(checkout / "examples")
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)
        (file,) = Path(folder, "disttrain-runs").glob("*/metrics/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [tuple(line.get(key) for key in COMPARED) for line in lines]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
