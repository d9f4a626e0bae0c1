"""What `make test` calls: pytest; where all tests are asked for, those of the cluster run beside the others.

End-to-end tests mostly wait, for pods, nodes and what a job says; the trainer's tests compute. In turn they take as
long as both together.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = ["tests"]
CLUSTER = "tests/e2e"
LOG = ROOT / ".pytest_cache" / "e2e.log"

Start = Callable[..., "subprocess.Popen[bytes]"]


def main(arguments: Sequence[str], start: Start = subprocess.Popen, log: Path = LOG) -> int:
    """The first exit code of pytest that is not 0."""
    pytest = [sys.executable, "-m", "pytest"]
    if list(arguments) != ALL:
        return start([*pytest, *arguments], cwd=ROOT).wait()
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as out:
        # Two runs of pytest that end together would write the same cache.
        command = [*pytest, CLUSTER, "-p", "no:cacheprovider"]
        cluster = start(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    print(f"{CLUSTER} runs beside all others; what it says is in {log}", flush=True)
    try:
        code = start([*pytest, *ALL, f"--ignore={CLUSTER}"], cwd=ROOT).wait()
    finally:
        # Also where we are interrupted: it has had the same signal, and takes its cluster down.
        cluster_code = cluster.wait()
        print(log.read_text(), flush=True)
    return code or cluster_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
