"""What `make test` calls: pytest; where all tests are asked for, those of Kubernetes run beside the others.

They mostly wait, for an API server, pods, nodes and what a job says; the trainer's tests compute. In turn they take as
long as both together. The real cluster comes last: once started it stays up until pytest ends.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = ["tests"]
KUBERNETES = ["tests/integration", "tests/e2e"]
LOG = ROOT / ".pytest_cache" / "kubernetes.log"

Start = Callable[..., "subprocess.Popen[bytes]"]


def main(arguments: Sequence[str], start: Start = subprocess.Popen, log: Path = LOG) -> int:
    """The first exit code of pytest that is not 0."""
    pytest = [sys.executable, "-m", "pytest"]
    if list(arguments) != ALL:
        return start([*pytest, *arguments], cwd=ROOT).wait()
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as out:
        # Two runs of pytest that end together would write the same cache.
        command = [*pytest, *KUBERNETES, "-p", "no:cacheprovider"]
        beside = start(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    print(f"{' and '.join(KUBERNETES)} run beside all others; what they say is in {log}", flush=True)
    try:
        code = start([*pytest, *ALL, *(f"--ignore={folder}" for folder in KUBERNETES)], cwd=ROOT).wait()
    finally:
        # Also where we are interrupted: it has had the same signal, and takes its cluster down.
        beside_code = beside.wait()
        print(log.read_text(), flush=True)
    return code or beside_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
