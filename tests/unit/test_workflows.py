"""What GitHub's workflows may do, and whose code they run."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.cluster.paths import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.y*ml"))
EVENTS = {"push", "pull_request", "schedule", "workflow_call"}
"""Not `pull_request_target` or `workflow_run`: they run with rights of ours what strangers send."""

RELEASE_RIGHTS = {
    "images": {"contents": "read", "packages": "write", "id-token": "write"},
    "chart": {"contents": "read", "packages": "write", "id-token": "write"},
    "pypi": {"id-token": "write"},
    "notes": {"contents": "write"},
}
"""What pushing and signing, a package index that trusts a workflow, and the notes of a release take."""

pytestmark = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)


def read(file: Path) -> dict[Any, Any]:
    return yaml.safe_load(file.read_text())


def jobs(file: Path) -> list[dict[str, Any]]:
    return list(read(file)["jobs"].values())


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(file) for step in job.get("steps", [])]


def test_every_action_is_named_by_its_commit_and_says_its_release(file: Path) -> None:
    """Red where one is named by its tag."""
    lines = [line.strip() for line in file.read_text().splitlines() if re.search(r"\buses:", line)]
    lines = [line for line in lines if not line.startswith("uses: ./")]  # of the same commit
    assert lines
    pinned = re.compile(r"- uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [line for line in lines if not pinned.fullmatch(line)] == []


def test_an_action_has_one_commit_in_all_workflows(file: Path) -> None:
    everywhere = {step["uses"] for other in WORKFLOWS for step in steps(other) if "uses" in step}
    actions = [use.partition("@")[0] for use in everywhere]
    assert sorted(actions) == sorted(set(actions))


def test_what_strangers_send_runs_without_rights(file: Path) -> None:
    """Red where a workflow of theirs may write."""
    workflow = read(file)
    events = set(workflow[True])  # YAML 1.1 reads the key `on` so
    assert events <= EVENTS
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    if "pull_request" in events:
        assert rights == {}
        assert not re.search(r"secrets\.|github\.token", file.read_text())
    if rights:
        assert workflow[True] == {"push": {"tags": ["v*"]}}
        assert rights == RELEASE_RIGHTS


def test_what_is_released_is_tested_signed_and_has_a_bill_of_materials(file: Path) -> None:
    """Red where an image or the chart has no signature, or where a base or an image is not named by its digest."""
    builds = [step["with"] for step in steps(file) if step.get("uses", "").startswith("docker/build-push-action@")]
    if not builds:
        return
    assert {build["file"] for build in builds} == {"operator/Dockerfile", "trainer_image/Dockerfile"}
    for build in builds:
        assert (build["push"], build["sbom"], build["provenance"]) == (True, True, "mode=max")
        assert build["platforms"] == "linux/amd64,linux/arm64"
        assert build["build-args"] == "BASE_IMAGE=${{ steps.names.outputs.base }}"
    by_name = read(file)["jobs"]
    assert any("qemu-user-static" in step.get("run", "") for step in by_name["images"]["steps"])
    assert by_name["test"]["uses"] == "./.github/workflows/complete.yaml"
    assert (by_name["images"]["needs"], by_name["chart"]["needs"]) == ("test", "images")
    images, chart = ("\n".join(step.get("run", "") for step in by_name[name]["steps"]) for name in ("images", "chart"))
    assert 'echo "base=$base@$digest"' in images
    assert 'cosign sign --yes "$OPERATOR" "$TRAINER"' in images
    assert 'release.chart "$GITHUB_REF_NAME" --operator "$OPERATOR" --trainer "$TRAINER"' in chart
    assert 'cosign sign --yes "$PREFIX/charts/disttrain@$digest"' in chart


def test_a_package_is_published_as_it_was_built_and_after_what_it_belongs_to(file: Path) -> None:
    """Red where something else than the upload runs with the right to publish, or notes come before what they name."""
    by_name = read(file)["jobs"]
    if "pypi" not in by_name:
        return
    pypi, notes = by_name["pypi"], by_name["notes"]
    uses = [step["uses"].partition("@")[0] for step in pypi["steps"]]
    assert uses == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert (pypi["environment"], pypi["needs"], notes["needs"]) == ("pypi", ["package", "chart"], ["chart", "pypi"])
    built, run = (str(by_name[name]["steps"]) for name in ("package", "notes"))
    assert "make package" in built
    assert "--notes-file notes" in run
    assert 'release.notes "$GITHUB_REF_NAME"' in str(by_name["images"]["steps"]), "found out before anything is pushed"


def test_the_complete_suite_is_that_of_a_machine_with_its_cluster_by_kind(file: Path) -> None:
    """Red where a part is named instead: then what tests/run.py lists runs nowhere, such as the oldest torch."""
    if file.name == "complete.yaml":
        scripts = {name: [step.get("run", "") for step in job["steps"]] for name, job in read(file)["jobs"].items()}
        assert "make test-all WITHOUT=e2e" in scripts["test"]
        assert any(script.endswith("make e2e") for script in scripts["e2e"])


def test_no_step_leaves_a_credential_in_the_checkout(file: Path) -> None:
    checkouts = [step for step in steps(file) if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_no_script_is_put_together_from_expressions(file: Path) -> None:
    """Names of tags and branches are anybody's words: a script gets them as variables of its environment."""
    assert [step["run"] for step in steps(file) if "${{" in step.get("run", "")] == []


def test_what_is_installed_has_a_known_hash(file: Path) -> None:
    scripts = [step["run"] for step in steps(file) if "run" in step]
    assert [script for script in scripts if re.search(r"\bpip3? install|\bcurl\b|\bwget\b", script)] == []
    if any(re.search(r"\bmake (lint|test|e2e|setup)", script) for script in scripts):
        assert read(file)["env"]["REQUIRE_HASHES"] == "1"
