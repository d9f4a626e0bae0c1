"""Run tests/gpu and gpu_gpt2.py on this machine's GPU, and write what came of them into docs/gpu.json and docs/gpu.md.

    python benchmarks/gpu_record.py [--only tests|benchmark] [--quick] [--seconds 480] [--commit NAME] [--folder FOLDER]
                                    [--log FILE]

Needs torch with CUDA and the packages of NEEDED, and says which are missing; for parameter servers pyzmq, for FP8
torchao; no plugin of pytest's. Ends with 2 without a GPU, with 1 where a package is missing, a test fails or does not
end, or the benchmark does not; what is known is written down as soon as it is. tests/gpu/worlds.py says by which
variable every layout runs, for which this needs more seconds.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from benchmarks.gpu_table import OUTCOMES, Record, Run, Selected, outcomes, page, selected, with_benchmark, with_tests

NO_GPU = 2
NEEDED = {
    "aiohttp": "aiohttp",
    "hypothesis": "hypothesis",
    "numpy": "numpy",
    "orjson": "orjson",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pytest": "pytest",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
    "torch": "torch",
    "typer": "typer",
    "yaml": "PyYAML",
}
"""Packages by the module that tests, `disttrain run` in one of them, and the benchmark import of each."""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        [
            *(str(REPOSITORY / part) for part in ("api", "trainer_image", "cli", "operator", ".")),
            os.environ.get("PYTHONPATH", ""),
        ]
    ),
}
# Options of pyproject.toml are for plugins that a GPU's machine need not have.
QUIET = ["-W", "ignore::pytest.PytestUnknownMarkWarning", "-p", "no:cacheprovider", "-q", "-rf"]
PYTEST = ["-m", "pytest", "-c", os.devnull, f"--rootdir={REPOSITORY}", *QUIET]
SECONDS = 480.0
TESTS_PART = 0.6
"""The tests' share of the seconds where the benchmark runs, too."""
LOOK_SECONDS = 0.5
ENDED_EARLY = 124
"""As timeout(1) ends."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tests", "benchmark"], help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="one micro batch size in the benchmark")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which what still runs is ended")
    parser.add_argument("--log", type=Path, help="keeps a JSON line for each outcome, and why a test failed")
    parser.add_argument("--commit", help="what runs; by default what git says")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "docs", help="where gpu.json and gpu.md lie")
    arguments = parser.parse_args()
    if lacking := [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(lacking)}: install them, or set GPU_PYTHON to a Python that has them"
        )
    run = this_run(arguments.commit)
    if run is None:
        print("gpu_record.py: torch.cuda.is_available() is false: no GPU here, nothing is written", file=sys.stderr)
        return NO_GPU
    end, codes = time.monotonic() + arguments.seconds, []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if arguments.only != "benchmark":
            part = 1.0 if arguments.only else TESTS_PART
            log = arguments.log or scratch / "tests.jsonl"
            codes.append(record_tests(arguments.folder, log, run, part * arguments.seconds))
        if arguments.only != "tests":
            left = end - time.monotonic()
            codes.append(record_benchmark(arguments.folder, scratch, run, left, quick=arguments.quick))
    return 1 if any(codes) else 0


def this_run(commit: str | None) -> Run | None:
    """What is about to run, and on what; None without a GPU. Raises SystemExit where the commit is unknown."""
    import torch  # a second, and `--help` needs none of it

    if not torch.cuda.is_available():
        return None
    return Run(commit or described(), torch.cuda.get_device_name(), torch.__version__, f"{datetime.now(UTC):%Y-%m-%d}")


def described() -> str:
    """The commit that is checked out, "-dirty" where files were changed."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{REPOSITORY} is no checkout of git: say what runs here by --commit") from error


def record_tests(folder: Path, log: Path, run: Run, seconds: float) -> int:
    """Run tests/gpu and write down what came of each path, as it comes; pytest's exit code."""
    log.unlink(missing_ok=True)
    before, reported = read(folder), set[str]()

    def look() -> None:
        tests = selected(log.read_text().splitlines()) if log.exists() else {}
        new = [test for test in tests.values() if test.outcome and test.name not in reported]
        for test in new:
            reported.add(test.name)
            print(f"gpu_record.py: {len(reported)} of {len(tests)}: {line_of(test)}", flush=True)
        if new:
            write(folder, with_tests(before, outcomes(tests.values()), run))

    command = [sys.executable, *PYTEST, str(REPOSITORY / "tests" / "gpu")]
    code = watched(command, ENVIRONMENT | {OUTCOMES: str(log.resolve())}, seconds, look)
    if code == ENDED_EARLY:
        print(f"gpu_record.py: tests were ended after {seconds:.0f} s", flush=True)
    return code


def line_of(test: Selected) -> str:
    """What is printed of a test that has ended."""
    # pytest's own account of a failure ends in where it was; the reason stands in the lines marked by E.
    why = next((line for line in test.why.splitlines() if line.startswith("E ")), test.why.partition("\n")[0])
    return f"{test.outcome}, {test.seconds:.0f} s, {test.name}{': ' if why else ''}{why[:200]}"


def record_benchmark(folder: Path, scratch: Path, run: Run, seconds: float, *, quick: bool) -> int:
    """Run gpu_gpt2.py and write its rows down, as they come; its exit code."""
    file = scratch / "rows.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu_gpt2.py"), f"--json={file}"]
    written = 0

    def look() -> None:
        nonlocal written
        # What is half written is whole at the next look.
        with suppress(FileNotFoundError, ValueError):
            rows = json.loads(file.read_text())["rows"]
            if len(rows) > written:
                written = len(rows)
                write(folder, with_benchmark(read(folder), rows, run))

    return watched([*command, *(["--quick"] if quick else [])], dict(os.environ), seconds, look)


def watched(command: list[str], environment: dict[str, str], seconds: float, look: Callable[[], None]) -> int:
    """Run a program, with `look` called now and then and at its end; after so many seconds end it with all it began."""
    end = time.monotonic() + seconds
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
            look()
        code = ENDED_EARLY if process.poll() is None else process.returncode
    finally:
        # Also what outlived the program: a rank that hangs holds its GPU.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    look()
    return code


def read(folder: Path) -> Record:
    """What is known so far."""
    file = folder / "gpu.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(folder: Path, record: Record) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "gpu.md").write_text(page(record))


if __name__ == "__main__":
    sys.exit(main())
