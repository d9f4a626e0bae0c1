"""`make test`: what runs beside what, and the exit code of all."""

import sys

import pytest

from tests.run import main


class Started:
    """Processes that are started, and end at once with the codes that are given."""

    def __init__(self, *codes):
        self.codes, self.commands = list(codes), []

    def __call__(self, command, cwd, env=None, stdout=None, stderr=None):
        words = " ".join(command).replace(f"{sys.executable} -m ", "")
        self.commands.append(words)
        if stdout is not None:
            stdout.write(f"of {words.partition('pytest ')[2].split()[0]}\n".encode())
        return self

    def wait(self):
        return self.codes.pop(0)


@pytest.mark.parametrize(
    ("others", "beside", "code"),
    [(0, (0, 0, 0), 0), (1, (0, 0, 0), 1), (0, (2, 0, 0), 2), (0, (0, 0, 3), 3), (1, (2, 4, 3), 1)],
)
def test_all_tests_run_side_by_side_and_the_first_code_that_is_not_0_counts(tmp_path, capsys, others, beside, code):
    started = Started(0, others, *beside)
    assert main(["tests"], started, tmp_path / "logs") == code
    assert started.commands == [
        "tests.cluster assets",
        "nice -n 0 pytest tests/e2e -p no:cacheprovider",
        "nice -n 5 pytest tests/integration -p no:cacheprovider",
        "nice -n 10 pytest tests/local -p no:cacheprovider",
        "nice -n 0 pytest tests --ignore=tests/e2e --ignore=tests/integration --ignore=tests/local",
    ]
    assert capsys.readouterr().out.endswith("of tests/e2e\n\nof tests/integration\n\nof tests/local\n\n")


def test_fewer_tests_are_pytests_own_affair(tmp_path):
    started = Started(3)
    assert main(["tests/unit", "-k", "rules"], started, tmp_path / "logs") == 3
    assert started.commands == ["pytest tests/unit -k rules"]
