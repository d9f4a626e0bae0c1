"""The hashed requirements fit pyproject.toml and constraints.txt, are whole, and are what images and CI install."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.lock import FILES, entries, requirements
from tools.cluster.paths import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
DOCKERFILES = [REPOSITORY / "operator" / "Dockerfile", REPOSITORY / "trainer_image" / "Dockerfile"]

file = pytest.mark.parametrize("file", FILES)


def locked(*files: str) -> dict[str, Requirement]:
    """Return what the files pin, by canonical name."""
    texts = [(REPOSITORY / file).read_text() for file in files]
    found = [Requirement(lines.split(" \\")[0]) for text in texts for _, lines in entries(text)]
    return {canonicalize_name(one.name): one for one in found}


def version(requirement: Requirement) -> str:
    (only,) = requirement.specifier
    assert only.operator == "==", requirement
    return only.version


def needed_by(name: str) -> list[str]:
    """Return what an installed package needs. What only builds ours is installed for the time of a build."""
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        assert name in {canonicalize_name(Requirement(line).name) for line in PROJECT["build-system"]["requires"]}
        return []


@file
def test_each_package_has_one_version_and_the_hashes_of_its_files(file: str) -> None:
    for _, lines in entries((REPOSITORY / file).read_text()):
        assert re.fullmatch(r"\S+==\S+( ; .+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", lines), lines[:200]


@file
def test_no_file_names_an_index(file: str) -> None:
    text = (REPOSITORY / file).read_text()
    assert "://" not in text
    assert [line for line in text.splitlines() if line.startswith("-")] == []


@file
def test_the_versions_are_those_of_the_constraints(file: str) -> None:
    pins = (line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines())
    constraints = {canonicalize_name(name): pinned for name, pinned in pins}
    others = {
        name: (version(one), constraints[name])
        for name, one in locked(file).items()
        if name in constraints and version(one) != constraints[name]
    }
    assert others == {}


@pytest.mark.parametrize(
    ("files", "extra"),
    [
        (["operator/requirements.txt"], "operator"),
        (["trainer_image/requirements.txt", "trainer_image/requirements-torch.txt"], "trainer"),
        (["requirements-dev.txt"], "dev"),
    ],
)
def test_all_that_pyproject_asks_for_is_there_with_all_that_it_needs(files: list[str], extra: str) -> None:
    pins = locked(*files)
    wanted, seen = [Requirement(line) for line in requirements(PROJECT, [extra])], set()
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        if (name, frozenset(one.extras)) in seen:
            continue
        seen.add((name, frozenset(one.extras)))
        assert name in pins, f"{one} is needed: make lock"
        assert one.specifier.contains(version(pins[name]), prereleases=True), f"{one} does not allow {pins[name]}"
        for line in needed_by(name):
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": part}) for part in ("", *one.extras)):
                wanted.append(needed)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_installs_by_hash_but_for_our_own_code_and_what_a_build_argument_adds(dockerfile: Path) -> None:
    """Red where requirements are installed without their hashes."""
    text = dockerfile.read_text()
    without = [line for line in re.findall(r"pip install (.*)", text) if "--require-hashes" not in line]
    own = [line for line in without if line.startswith("--no-deps --no-build-isolation . ")]
    assert len(own) == 1
    asked = ("${TORCH_INDEX_ARGS} ", '-c constraints.txt --no-build-isolation ".[${EXTRAS}]"')
    assert [line for line in without if line not in own and not line.startswith(asked)] == []
    for file in re.findall(r"^COPY (.*requirements.*) \./$", text, re.MULTILINE):
        assert set(file.split()) <= set(FILES)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_the_base_image_may_be_named_by_digest(dockerfile: Path) -> None:
    """Red where the base is written out."""
    text = dockerfile.read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+$", text, re.MULTILINE)
    assert re.findall(r"^FROM (.*)$", text, re.MULTILINE) == ["${BASE_IMAGE}"]
