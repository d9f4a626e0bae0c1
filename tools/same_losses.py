"""Says whether two checkouts train the examples to the same losses, to the last bit.

    python -m tools.same_losses OTHER_CHECKOUT [EXAMPLE …]

After a change that should move no number, OTHER_CHECKOUT is a worktree of the commit before. An example whose losses
differ runs once more from OTHER_CHECKOUT: where these two differ as well, its losses follow from chance, as those of
workers that do not wait for each other.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("api", "operator", "trainer_image", "cli")
# Of every line; the others of a line are times.
COMPARED = ("step", "loss_metrics/global_avg_loss", "grad_norm", "lr", "validation_metrics/global_avg_loss")
# What trains nothing here, or needs more than this machine has.
LEFT_OUT = {"collectives", "corpus", "torchrun-gpu"}

Figures = list[tuple[float | None, ...]]


def main(arguments: Sequence[str]) -> int:
    """Print a line per example. Returns 1 where losses differ that should not, else 0."""
    other, *names = arguments
    former = Path(other).resolve()
    shared = {path.stem for path in (former / "examples").glob("*.yaml")} - LEFT_OUT
    differ = 0
    for name in names or sorted(shared):
        answer = compare(former, name)
        differ += answer == "differs"
        print(f"{name}: {answer}", flush=True)
    return min(differ, 1)


def compare(former: Path, name: str) -> str:
    """Return "same", "differs" or "differs by chance"."""
    before = figures(former, name)
    if figures(REPOSITORY, name) == before:
        return f"same ({len(before)} lines)"
    return "differs" if figures(former, name) == before else "differs by chance"


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
