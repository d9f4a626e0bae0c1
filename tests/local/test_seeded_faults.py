"""Faults that users meet: `disttrain run` ends with the cause, and with what to do."""

from typing import Any

import pytest

from disttrain_api.names import ExitCode
from tests.builders import merge

from .conftest import Workplace, own

SHORT: dict[str, Any] = {"steps": 5, "microBatchSize": 16, "optimizer": {"name": "SGD", "learningRate": 0.1}}


def ends(workplace: Workplace, path: Any, code: int, cause: str, advice: str) -> None:
    run = workplace.run(path)
    assert run.exit_code == code, run.stderr
    block = run.stderr[run.stderr.index("Failed: ") :]
    assert cause in block.splitlines()[1]
    assert advice in "".join(line for line in block.splitlines() if line.startswith("  what to do: ")), block


@pytest.mark.parametrize(
    ("words", "cause", "advice"),
    [
        (["python", "-c", "raise KeyError('label')"], "code 1: KeyError: 'label'", "Correct the program"),
        (["python", "-c", "import flash_attentive"], "No module named 'flash_attentive'", "Put the module into"),
        (["python", "nowhere.py"], "can't open file", "Correct the program"),
        (["trainn"], "no such program: trainn", "Correct the command"),
        (["sh", "-c", "trainn --steps 5"], "exited with code 127", "Correct the command"),
        (["python", "-c", "import os; os.kill(os.getpid(), 9)"], "killed by signal 9", "Find out what killed it"),
        (["python", "-c", "import os; os.kill(os.getpid(), 11)"], "killed by signal 11", "native code"),
    ],
    ids=["an exception", "a module", "a script", "a program", "a word of the shell", "SIGKILL", "SIGSEGV"],
)
def test_a_program_of_ones_own(workplace: Workplace, words: list[str], cause: str, advice: str) -> None:
    ends(workplace, own(workplace, *words, runPolicy={"maxRestarts": 0}), 1, cause, advice)


def test_a_program_that_takes_too_long(workplace: Workplace) -> None:
    path = own(workplace, "sleep", "1000", activeDeadlineSeconds=2)
    ends(workplace, path, 1, "activeDeadlineSeconds", "Raise `spec.activeDeadlineSeconds`")


@pytest.mark.parametrize(
    ("training", "code", "cause", "advice"),
    [
        (
            {"model": {"name": None, "entrypoint": "my_models:Large"}},
            ExitCode.ENTRYPOINT_NOT_IMPORTABLE,
            "No module named 'my_models'",
            "Put the module into the image",
        ),
        ({"optimizer": {"learningRate": 1e30}}, 1, "the loss of step 2 is nan", "Lower the learning rate"),
    ],
    ids=["its model", "its loss"],
)
def test_a_training(workplace: Workplace, training: dict[str, Any], code: int, cause: str, advice: str) -> None:
    path = workplace.write(workers={"replicas": 1}, training=merge(SHORT, training))
    ends(workplace, path, code, cause, advice)
