"""What a user gets wrong: one clear message, an exit code, a condition with a reason, and never a hang."""

import contextlib
import socket
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from disttrain_api.names import ExitCode

from .conftest import Run, Workplace

SHORT: dict[str, Any] = {"steps": 5, "microBatchSize": 16}


def failed(run: Run, reason: str, sentence: str, code: int) -> None:
    assert run.exit_code == code, run.stderr
    condition = run.condition("Failed")
    assert (condition["status"], condition["reason"]) == ("True", reason)
    assert sentence in condition["message"]
    assert run.status["phase"] == "Failed"
    block = run.stderr[run.stderr.index(f"Failed: {reason}") :]
    assert sentence in block.splitlines()[1]
    assert "log: disttrain-runs/" in block


def test_missing_data_fails_at_once(workplace: Workplace) -> None:
    data = {"name": "text", "config": {"paths": ["/nowhere/corpus"]}}
    training = {**SHORT, "model": {"name": "gpt"}, "data": data}
    run = workplace.run(workplace.write(workers={"replicas": 2}, training=training))
    failed(run, "DataNotFound", "/nowhere/corpus does not exist", ExitCode.DATA_NOT_FOUND)
    assert run.status["attempt"] == 1
    assert "Traceback" not in run.stderr


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def first_ports(port: int) -> list[str]:
    """`disttrain` on a machine where the port was taken after it had been found free."""
    code = f"""
import sys
from disttrain.local import runner
found = runner.free_ports
taken = [{port}]
runner.free_ports = lambda count: [taken.pop(), *found(count - 1)] if taken else found(count)
from disttrain.main import main
sys.exit(main())
"""
    return [sys.executable, "-c", code]


def test_a_port_in_use_is_named_and_the_next_attempt_takes_another(workplace: Workplace) -> None:
    path = workplace.write(workers={"replicas": 2}, training=SHORT)
    with listening() as port:
        run = workplace.run(path, command=first_ports(port))
    assert run.exit_code == 0, run.stderr
    assert run.status["restarts"] == 1
    verdict = run.status["attempts"][0]["verdict"]
    assert (verdict["reason"], str(port) in verdict["message"]) == ("PortInUse", True)


def test_a_failing_program_of_the_users_own_is_quoted(workplace: Workplace) -> None:
    (workplace.folder / "my_model.py").write_text(
        textwrap.dedent(
            """
            import os
            def make():
                if os.environ["RANK"] == "1":
                    raise ValueError("seven is not a layer")
                import torch
                return torch.nn.Linear(64, 10)
            """
        )
    )
    training = {**SHORT, "model": {"name": None, "entrypoint": "my_model:make"}}
    run = workplace.run(workplace.write(workers={"replicas": 2}, training=training, runPolicy={"maxRestarts": 0}))
    failed(run, "RankFailed", "rank 1 ", 1)
    verdict = run.status["attempts"][0]["verdict"]
    assert (verdict["rank"], verdict["exitCode"]) == (1, 1)
    assert "seven is not a layer" in verdict["message"]
    assert "seven is not a layer" in run.stderr


def test_a_folder_that_cannot_be_written_is_named(workplace: Workplace) -> None:
    (workplace.folder / "taken").write_text("a file")
    run = workplace.run(workplace.write(training=SHORT), "--runs", workplace.folder / "taken")
    assert run.exit_code == 1
    assert run.stderr.startswith(f"disttrain: cannot write to {workplace.folder / 'taken'}: Not a directory; ")
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("status", "message"), [(None, "is not the folder of a run"), ("spec: [", "status.yaml is damaged")]
)
def test_resuming_what_is_no_run_is_refused(workplace: Workplace, status: str | None, message: str) -> None:
    if status is not None:
        (workplace.folder / "status.yaml").write_text(status)
    run = workplace.run("--resume", workplace.folder)
    assert run.exit_code == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
