"""The house itself: imports go one way, modules stay small, each thing has its place, generated files are generated."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_api import agent_api
from disttrain_api.crd import custom_resource_definition, to_helm, to_yaml
from disttrain_api.reference import reference
from helm import document
from tools.cluster.paths import REPOSITORY

MAX_LINES = 400
# kubectl stores what was applied as JSON in an annotation, of which an object has at most 262144 bytes.
MAX_APPLIED_BYTES = 254_000
PACKAGES = ("api", "operator", "trainer_image", "cli", "helm", "release", "benchmarks", "tools", "tests")


def modules() -> list[Path]:
    """Every module of ours."""
    return sorted(module for package in PACKAGES for module in (REPOSITORY / package).rglob("*.py"))


def test_imports_go_one_way() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_is_longer_than_people_like_to_read() -> None:
    lengths = {str(module.relative_to(REPOSITORY)): len(module.read_text().splitlines()) for module in modules()}
    assert len(lengths) > 50
    assert {module: length for module, length in lengths.items() if length > MAX_LINES} == {}


def test_one_module_of_the_trainer_knows_what_differs_between_a_cpu_and_a_gpu() -> None:
    """So that another kind of device is a matter of that module."""
    branch = re.compile(r"cuda|device\.(type|kind) [!=]= ", re.IGNORECASE)
    trainer = REPOSITORY / "trainer_image" / "disttrain_trainer"
    knowing = {
        str(module.relative_to(trainer)) for module in trainer.rglob("*.py") if branch.search(module.read_text())
    }
    assert knowing == {"runtime/device.py"}


CLOCKS = re.compile(r"\b(time\.(time|monotonic|perf_counter|process_time)(_ns)?|(loop|get_running_loop\(\))\.time)\(")
CLOCK_READERS = {"integration/test_fairness.py": "how many tries came by themselves meanwhile is a bound, not a goal"}


def test_a_comment_begins_with_what_it_is_about() -> None:
    """Neither docstrings nor comments begin with "Of", whose subject the reader has to find."""
    begins = re.compile(r'^[^\S\n]*(#|"{3}) ?Of ', re.MULTILINE)
    assert [str(module.relative_to(REPOSITORY)) for module in modules() if begins.search(module.read_text())] == []


def test_no_test_looks_at_a_clock() -> None:
    """A loaded machine is normal: tests wait on conditions (tests/waiting.py) or hand in a clock of their own."""
    tests = REPOSITORY / "tests"
    reading = {
        str(module.relative_to(tests)) for module in tests.rglob("test_*.py") if CLOCKS.search(module.read_text())
    }
    assert reading == set(CLOCK_READERS)


def test_torch_loads_no_code() -> None:
    """`weights_only=True` is written out: a default may change, and a pickle runs code. Red where `weights_only` is
    left out or false."""
    trainer = REPOSITORY / "trainer_image" / "disttrain_trainer"
    calls = [
        (module.name, {one.arg: ast.unparse(one.value) for one in node.keywords})
        for module in trainer.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [module for module, options in calls if options.get("weights_only") != "True"] == []


@pytest.mark.parametrize(
    ("path", "generated"),
    [
        ("crds/disttrain.io_disttrainingjobs.yaml", to_yaml(custom_resource_definition())),
        ("helm/disttrain/templates/crd.yaml", to_helm(custom_resource_definition())),
        ("docs/reference.md", reference()),
        ("docs/agent-api.json", agent_api.to_json(agent_api.document())),
        *((str(path.relative_to(REPOSITORY)), text) for path, text in document.generated().items()),
    ],
)
def test_a_generated_file_is_what_its_generator_writes(path: str, generated: str) -> None:
    assert (REPOSITORY / path).read_text() == generated, f"{path} has drifted: run `make generate`"


def test_the_definition_fits_a_client_side_apply() -> None:
    applied = json.dumps(custom_resource_definition(), separators=(",", ":"))
    assert len(applied.encode()) < MAX_APPLIED_BYTES
