"""`disttrain collectives`, and the same check as a job."""

import json
import subprocess
from pathlib import Path

from .conftest import DISTTRAIN, Workplace

EXAMPLE = Path(__file__).parents[2] / "examples" / "collectives.yaml"
OPERATIONS = 9


def collectives(workplace: Workplace, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*DISTTRAIN, "collectives", *arguments]
    return subprocess.run(command, cwd=workplace.folder, capture_output=True, text=True, check=False)


def test_the_command_prints_what_it_found_and_leaves_nothing_behind(workplace: Workplace) -> None:
    done = collectives(workplace, "--ranks=3", "--sizes=1Ki,3k", "--groups=world,1:", "--iterations=2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 2 * 2 * OPERATIONS
    assert {tuple(row["ranks"]) for row in rows} == {(0, 1, 2), (1, 2)}
    assert [row for row in rows if row["wrong"]] == []
    assert list(workplace.folder.iterdir()) == []


def test_a_group_that_cannot_be_is_usage(workplace: Workplace) -> None:
    done = collectives(workplace, "--ranks=2", "--groups=0+2")
    assert done.returncode == 2
    assert done.stderr == "disttrain: --groups: group '0+2' has 0+2: expected two or more different ranks of 0 to 1\n"


def test_ranks_that_cannot_check_say_why(workplace: Workplace) -> None:
    """A size that no machine has."""
    done = collectives(workplace, "--ranks=2", "--sizes=1000000G", "--operations=broadcast")
    assert done.returncode == 1
    assert "memory" in done.stderr
    assert list(workplace.folder.iterdir()) == []


def test_the_example_checks_two_pods_of_two_ranks(workplace: Workplace) -> None:
    run = workplace.run(EXAMPLE)
    assert run.exit_code == 0, run.stderr
    log = run.log(0, 1)
    assert "# world: ranks 0-3, 1048576 bytes" in log
    assert "# ::2: ranks 0,2, 1024 bytes" in log
    assert f"{2 * 2 * OPERATIONS} checks, all right" in log
