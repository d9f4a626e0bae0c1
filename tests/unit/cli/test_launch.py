"""What a planned pod becomes as a process."""

import sys
from pathlib import Path
from typing import Any

import pytest

from disttrain.local.launch import Launch, expand, launch


def a_pod(*env: dict[str, Any], **container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "command": ["run"], **container, "env": list(env)}]}}


def launched(pod: dict[str, Any], **shell: str) -> Launch:
    defaults = {"HOME": "/scratch", "USER": "disttrain", "TMPDIR": "/scratch"}
    return launch(pod, shell=shell, local={"THREADS": "1"}, scratch_defaults=defaults, folder=Path("/here"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("$(A)/x", "a/x"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$(A)$(B)", "ab"),
    ],
)
def test_references_are_those_of_kubernetes(text: str, expected: str) -> None:
    assert expand(text, {"A": "a", "B": "b"}) == expected


def test_a_variable_refers_to_those_before_it_only() -> None:
    entries = [
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "x"},
        {"name": "LAST", "value": "$(LATE)"},
    ]
    environment = launched(a_pod(*entries)).environment
    assert (environment["EARLY"], environment["LAST"]) == ("$(LATE)", "x")


def test_the_template_wins_over_this_machine_and_this_machine_over_the_shell() -> None:
    assert launched(a_pod(), THREADS="8").environment["THREADS"] == "1"
    assert launched(a_pod({"name": "THREADS", "value": "4"}), THREADS="8").environment["THREADS"] == "4"


def test_the_users_own_folders_stay_unless_the_template_names_others() -> None:
    planned = [
        {"name": "HOME", "value": "/scratch"},
        {"name": "USER", "value": "disttrain"},
        {"name": "TMPDIR", "value": "/scratch"},
    ]
    environment = launched(a_pod(*planned), HOME="/home/me", USER="me").environment
    assert (environment["HOME"], environment["USER"]) == ("/home/me", "me")
    assert "TMPDIR" not in environment, "Python's own choice, as the user's other programs"
    environment = launched(a_pod({"name": "HOME", "value": "/elsewhere"}), HOME="/home/me").environment
    assert environment["HOME"] == "/elsewhere"


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "TORCHELASTIC_RUN_ID"]
)
def test_variables_of_another_distributed_run_do_not_reach_this_one(name: str) -> None:
    assert name not in launched(a_pod(), **{name: "7"}).environment


def test_python_is_the_one_that_runs_this_command_and_its_programs_come_first() -> None:
    found = launched(a_pod(command=["python3", "-c"], args=["print()"]), PATH="/usr/bin")
    assert found.command == (sys.executable, "-c", "print()")
    assert found.environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_a_working_folder_is_taken_from_the_current_one() -> None:
    assert launched(a_pod()).folder == Path("/here")
    assert launched(a_pod(workingDir="src")).folder == Path("/here/src")
    assert launched(a_pod(workingDir="/workspace")).folder == Path("/workspace")


def test_a_variable_refers_to_one_that_the_shell_has_for_a_cluster() -> None:
    entries = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "HEADER", "value": "Bearer $(TOKEN)"},
    ]
    assert launched(a_pod(*entries), TOKEN="t").environment["HEADER"] == "Bearer t"
    assert launched(a_pod(*entries)).environment["HEADER"] == "Bearer $(TOKEN)"
