"""What a release writes into the chart, and that its tag is the version."""

import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml

from release.chart import CHART, ReleaseError, check_versions, with_images, with_list
from tools.cluster.paths import IMAGE_TAG, REPOSITORY

DIGEST = "sha256:" + "0123456789abcdef" * 4
OPERATOR, TRAINER = f"r.example:5000/o/operator@{DIGEST}", f"r.example:5000/o/trainer@{DIGEST}"
VALUES = (CHART / "values.yaml").read_text()


def test_the_values_name_both_images_by_digest_and_change_nothing_else() -> None:
    """Red where a digest is left out."""
    changed = with_images(VALUES, OPERATOR, TRAINER)
    before, after = yaml.safe_load(VALUES), yaml.safe_load(changed)
    for section, image in ((("image",), OPERATOR), (("trainer", "image"), TRAINER)):
        was, now = (reduce(getitem, section, values) for values in (before, after))
        assert (now["repository"], now["digest"]) == tuple(image.split("@"))
        now.update(repository=was["repository"], digest=was["digest"])
    assert before == after
    assert changed.count("#") == VALUES.count("#")


def test_the_list_for_mirrors_names_both_images_and_nothing_else_changes() -> None:
    before = (CHART / "Chart.yaml").read_text()
    changed = with_list(before, OPERATOR, TRAINER)
    listed = yaml.safe_load(yaml.safe_load(changed)["annotations"]["artifacthub.io/images"])
    assert listed == [{"name": "operator", "image": OPERATOR}, {"name": "trainer", "image": TRAINER}]
    lines = zip(before.splitlines(), changed.splitlines(), strict=True)
    assert sum(one != other for one, other in lines) == 2


def test_an_image_without_a_digest_is_refused() -> None:
    with pytest.raises(ReleaseError, match=r"must both be REPOSITORY@sha256:DIGEST"):
        with_images(VALUES, "r.example/operator:1", TRAINER)


def test_values_that_no_longer_have_the_lines_are_no_release() -> None:
    with pytest.raises(ReleaseError, match="0 lines"):
        with_images(VALUES.replace("\ntrainer:", "\nimages:"), OPERATOR, TRAINER)


def test_a_tag_is_the_version_of_package_and_chart(tmp_path: Path) -> None:
    check_versions(f"v{IMAGE_TAG}")
    with pytest.raises(ReleaseError, match=f"the tag is v9, and pyproject.toml has {IMAGE_TAG}"):
        check_versions("v9")
    (tmp_path / "helm" / "disttrain").mkdir(parents=True)
    for file in ("pyproject.toml", "helm/disttrain/Chart.yaml"):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    chart = tmp_path / "helm" / "disttrain" / "Chart.yaml"
    chart.write_text(chart.read_text().replace(f"appVersion: {IMAGE_TAG}", "appVersion: 9.9.9"))
    with pytest.raises(ReleaseError, match="appVersion"):
        check_versions(f"v{IMAGE_TAG}", tmp_path)
