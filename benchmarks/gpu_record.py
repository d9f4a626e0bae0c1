"""Run tests/gpu and gpu_gpt2.py on this machine's GPU, and write what came of them into docs/gpu.json and docs/gpu.md.

    python benchmarks/gpu_record.py [--only tests|benchmark] [--quick] [--commit NAME] [--folder FOLDER]

Needs torch with CUDA, pydantic, pytest, scikit-learn; no plugin of pytest's. Ends with 2 without a GPU, with 1 where a
test fails or the benchmark does not end; what did run is written down nevertheless.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from benchmarks.gpu_table import Record, Run, outcomes, page, with_benchmark, with_tests

NO_GPU = 2
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("api", "trainer_image", ".")),
}
# Options of pyproject.toml are for plugins that a GPU's machine need not have.
QUIET = ["-W", "ignore::pytest.PytestUnknownMarkWarning", "-p", "no:cacheprovider", "-q", "-rf"]
PYTEST = ["-m", "pytest", "-c", os.devnull, f"--rootdir={REPOSITORY}", *QUIET]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tests", "benchmark"], help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="one micro batch size in the benchmark")
    parser.add_argument("--commit", help="what runs; by default what git says")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "docs", help="where gpu.json and gpu.md lie")
    arguments = parser.parse_args()
    run = this_run(arguments.commit)
    if run is None:
        print("gpu_record.py: torch.cuda.is_available() is false: no GPU here, nothing is written", file=sys.stderr)
        return NO_GPU
    codes = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if arguments.only != "benchmark":
            codes.append(record_tests(arguments.folder, scratch, run))
        if arguments.only != "tests":
            codes.append(record_benchmark(arguments.folder, scratch, run, quick=arguments.quick))
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


def record_tests(folder: Path, scratch: Path, run: Run) -> int:
    """Run tests/gpu and write down what came of each path; pytest's exit code."""
    report = scratch / "junit.xml"
    command = [sys.executable, *PYTEST, f"--junitxml={report}", str(REPOSITORY / "tests" / "gpu")]
    code = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, check=False).returncode
    if report.exists():
        write(folder, with_tests(read(folder), outcomes(report.read_text()), run))
    return code


def record_benchmark(folder: Path, scratch: Path, run: Run, *, quick: bool) -> int:
    """Run gpu_gpt2.py and write its rows down; its exit code."""
    file = scratch / "rows.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu_gpt2.py"), f"--json={file}"]
    code = subprocess.run([*command, *(["--quick"] if quick else [])], cwd=REPOSITORY, check=False).returncode
    if file.exists():
        write(folder, with_benchmark(read(folder), json.loads(file.read_text())["rows"], run))
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
