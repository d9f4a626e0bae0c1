"""Notes of a release and the page of its package."""

import pytest

from release.chart import ReleaseError
from release.notes import main, section, with_addresses
from tools.cluster.paths import IMAGE_TAG, REPOSITORY

CHANGELOG = """# Changes

## Unreleased

- new

## 1.2.0 – 2026-01-31

### Added

- one

## [1.1.0]

## 1.0.0
- first
"""


def test_a_section_is_that_of_its_version_alone() -> None:
    assert section(CHANGELOG, "1.2.0") == "### Added\n\n- one"
    assert section(CHANGELOG, "1.0.0") == "- first"


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("1.1.0", "says nothing below its heading of 1.1.0"),
        ("1.2", r"no heading `## 1.2`, only Unreleased, 1.2.0, \[1.1.0\], 1.0.0: rename `## Unreleased`"),
    ],
)
def test_a_version_without_notes_is_no_release(version: str, sentence: str) -> None:
    with pytest.raises(ReleaseError, match=sentence):
        section(CHANGELOG, version)


def test_links_to_files_have_an_address_and_others_stay() -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.png) [c](#c) [w](https://w.example/x) [m](mailto:a@b)"
    assert with_addresses(text, "https://h.example/o/r/", "v1") == (
        "[a](https://h.example/o/r/blob/v1/docs/a.md#b) ![p](https://h.example/o/r/raw/v1/docs/p.png)"
        " [c](#c) [w](https://w.example/x) [m](mailto:a@b)"
    )


def test_no_link_of_the_readme_stays_without_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"v{IMAGE_TAG}", "--readme", "https://h.example/o/r"]) == 0
    text = capsys.readouterr().out
    assert text.count("](") == (REPOSITORY / "README.md").read_text().count("](") == text.count("](https://")


def test_a_tag_of_another_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["v9"]) == 1
    assert "the tag is v9" in capsys.readouterr().err
