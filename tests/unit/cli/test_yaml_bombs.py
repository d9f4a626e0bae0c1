"""The verbs that read a user's YAML: a file that stands for far more than it says costs what it says."""

import subprocess
import sys
from pathlib import Path

from tests.unit.api.yaml_bombs import BYTES

SPARE_BYTES = 256 * 2**20
IN_A_CHILD = f"""
import pathlib, resource, sys
from disttrain.main import main
import disttrain.run, disttrain.submit, disttrain.plan
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {SPARE_BYTES},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
for verb in ("validate", "run", "submit", "plan"):
    assert main([verb, sys.argv[1]]) == 1
"""


def test_200_kb_that_stand_for_a_gigabyte_are_refused_by_every_verb_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(f"a: &a {'x' * 200_000}\nb: [{'*a,' * 6000}]\n")
    command = [sys.executable, "-c", IN_A_CHILD, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr.splitlines() == [f"{file}:2: {BYTES}"] * 4, done.stderr[-2000:]
