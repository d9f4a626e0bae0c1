"""How long ranks that start again in their pods take to restore a checkpoint: from the files that the kernel still
holds in memory, beside a copy in memory that somebody else would keep; and from the disk alone. Two ranks on gloo.

A GPT of 26 million parameters with AdamW: 310 MB. Where the first two are alike, a copy of its own gains nothing.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness, ranks
from benchmarks.checkpoint_stall import STRATEGIES, large_job
from benchmarks.trainer_overhead import RANKS

MEMORY = "/dev/shm"


def measure(quick: bool) -> Iterator[harness.Row]:
    repeats = 2 if quick else 10
    for name, parallelism in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=MEMORY) as memory:
            (Path(folder) / "job.json").write_text(json.dumps(large_job(parallelism)))
            printed = ranks.run(Path(folder), "benchmarks.restoring_rank", RANKS, str(repeats), memory)
        lines = [[float(word) for word in line.split()] for line in printed.splitlines()]
        disk, held, copied = zip(*lines, strict=True)
        yield harness.row(f"{name}: files that the kernel holds", "s", held, copied)
        yield harness.row(f"{name}: files on disk alone", "s", disk, copied)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
