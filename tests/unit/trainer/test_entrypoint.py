"""Where code of the user's is looked for, and what its files hide."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain_agent.main import TRAINER
from disttrain_api.names import ExitCode
from disttrain_trainer.runtime.entrypoint import call_entrypoint
from disttrain_trainer.runtime.errors import EntrypointNotImportable
from tests.waiting import GENEROUS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of a rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = dict(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    assert all(sys.modules[name] is module for name, module in before.items())


def call(name: str) -> object:
    return call_entrypoint("training.model", name, {})


def test_files_in_the_working_folder_hide_no_module_of_a_rank(tmp_path: Path) -> None:
    for name in {*sys.stdlib_module_names, "yaml", "numpy", "torch", "pydantic", "disttrain_api", "disttrain_trainer"}:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user's file')")
    found = subprocess.run(
        TRAINER,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=GENEROUS,
        check=False,
    )
    assert found.returncode == ExitCode.INVALID_CONFIGURATION, found.stderr
    assert found.stderr.startswith("disttrain: InvalidConfiguration: ")


def test_an_entry_point_finds_the_files_beside_it(folder: Path) -> None:
    (folder / "own_model.py").write_text("import own_part\ndef build():\n    import own_late\n    return own_part.x")
    (folder / "own_part.py").write_text("x = 5")
    (folder / "own_late.py").write_text("")
    (folder / "own_later.py").write_text("")
    assert call("own_model:build") == 5
    (folder / "firm").mkdir()
    (folder / "firm" / "__init__.py").write_text("from .part import build")
    (folder / "firm" / "part.py").write_text("from own_part import x\ndef build():\n    return x + 1")
    assert call("firm:build") == 6
    # Also later, but behind all other folders.
    importlib.import_module("own_later")
    assert sys.path[-1] == str(folder)
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize("name", ["json", "queue", "random"])
def test_a_file_called_as_a_module_of_pythons_is_the_users_and_once(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text("made = []\ndef build():\n    made.append(1)\n    return len(made)")
    (folder / "beside.py").write_text(f"import {name}\nbuild = {name}.build")
    assert [call(f"{name}:build"), call("beside:build"), call(f"{name}:build")] == [1, 2, 3]
    assert importlib.import_module("json") is json, "not for what is imported later"


def test_a_folder_that_python_was_given_stays_where_it_is(folder: Path) -> None:
    (folder / "given.py").write_text("def build():\n    return 1")
    sys.path.insert(1, str(folder))
    before = list(sys.path)
    assert call("given:build") == 1
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "time",
            r"'build' in Python's built-in module 'time', which hides a file of that name, is nothing, expected a",
        ),
        ("bare", r"'build' in .*/bare, a folder without __init__.py, is nothing, expected a function"),
        ("own", r"'build' in .*/own.py is a int, expected a function"),
    ],
)
def test_where_nothing_is_found_the_place_is_named(folder: Path, name: str, message: str) -> None:
    (folder / "time.py").write_text("def build(): pass")
    (folder / "own.py").write_text("build = 5")
    (folder / "bare").mkdir()
    with pytest.raises(EntrypointNotImportable, match=message):
        call(f"{name}:build")
