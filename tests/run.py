"""What `make test` calls: pytest; where all tests are asked for, in four lanes beside each other.

Those on a cluster mostly wait, for pods, nodes and what a job says; those of integration for an API server; the local
ones for programs to start; the others compute. In turn they take as long as all together. The API server is built
before the lanes begin; what a cluster needs, and the images, beside them.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = ["tests"]
BESIDE = {"e2e": "0", "integration": "5", "local": "10"}
"""Niceness of each lane that runs beside all other tests, by its folder."""
NICE = "0"
"""Of the others, which compute one after the other. What is shortest comes last: they are to end together. Each step is
a fifth less of a processor."""
ASSETS = [sys.executable, "-m", "tests.cluster", "assets"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Lanes fill the processors by themselves: threads of one process that spin until the next is done take them away."""
LOGS = ROOT / ".pytest_cache"

Start = Callable[..., "subprocess.Popen[bytes]"]


def main(arguments: Sequence[str], start: Start = subprocess.Popen, logs: Path = LOGS) -> int:
    """The first exit code of pytest that is not 0."""
    pytest = [sys.executable, "-m", "pytest"]
    if list(arguments) != ALL:
        return start([*pytest, *arguments], cwd=ROOT).wait()
    environment = ONE_THREAD | os.environ
    # Where it fails, the tests that need it say so.
    start(ASSETS, cwd=ROOT).wait()
    logs.mkdir(exist_ok=True)
    beside = {}
    for lane, nice in BESIDE.items():
        with (logs / f"{lane}.log").open("wb") as out:
            # Runs of pytest that end together would write the same cache.
            command = ["nice", "-n", nice, *pytest, f"tests/{lane}", "-p", "no:cacheprovider"]
            beside[lane] = start(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        print(f"tests/{lane} run beside all others; what they say is in {out.name}", flush=True)
    elsewhere = [f"--ignore=tests/{lane}" for lane in BESIDE]
    codes = []
    try:
        codes.append(start(["nice", "-n", NICE, *pytest, *ALL, *elsewhere], cwd=ROOT, env=environment).wait())
    finally:
        # Also where we are interrupted: they have had the same signal, and take what they started down.
        for lane, process in beside.items():
            codes.append(process.wait())
            print((logs / f"{lane}.log").read_text(), flush=True)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
