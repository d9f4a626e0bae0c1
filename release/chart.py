"""`python -m release.chart v1.2.3`: checks that a tag is the version of everything that bears one.

With --operator and --trainer, each REPOSITORY@sha256:DIGEST, the chart then names these two images: in its values, and
in the list for mirrors.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHART = REPOSITORY / "helm" / "disttrain"
_IMAGE = re.compile(r"([a-z0-9][a-z0-9./:_-]*)@(sha256:[0-9a-f]{64})")
# Where an image's lines are in values.yaml and in Chart.yaml. A parser would lose the comments, which are the values'
# documentation.
_SECTIONS = {"operator": r"^image:\n(?:[ #].*\n)*?  ", "trainer": r"^trainer:\n(?:[ #].*\n)*?    "}
_LISTED = r"^    - name: {}\n      image: "
_VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "helm/disttrain/Chart.yaml": r"^version: (.+)$",
    "helm/disttrain/Chart.yaml (appVersion)": r'^appVersion: "?([^"\n]+)"?$',
}


class ReleaseError(Exception):
    """What a release would get wrong."""


def check_versions(tag: str, repository: Path = REPOSITORY) -> None:
    """Raise ReleaseError unless the tag is `v` and the version that each file has."""
    for where, pattern in _VERSIONS.items():
        found = re.search(pattern, (repository / where.split()[0]).read_text(), re.MULTILINE)
        version = found[1] if found else "no version"
        if tag != f"v{version}":
            raise ReleaseError(f"the tag is {tag}, and {where} has {version}")


def with_images(values: str, operator: str, trainer: str) -> str:
    """Return the chart's values with these images in place of what they name."""
    for name, image in (("operator", operator), ("trainer", trainer)):
        split = _IMAGE.fullmatch(image)
        if split is None:
            raise ReleaseError(f"{operator} and {trainer} must both be REPOSITORY@sha256:DIGEST")
        for field, value in zip(("repository", "digest"), split.groups(), strict=True):
            values = _with(values, f"{_SECTIONS[name]}{field}: ", value)
    return values


def with_list(chart: str, operator: str, trainer: str) -> str:
    """Return Chart.yaml with these images in its list for mirrors."""
    return _with(_with(chart, _LISTED.format("operator"), operator), _LISTED.format("trainer"), trainer)


def _with(text: str, before: str, value: str) -> str:
    """Return the text with `value` as the rest of the one line that begins so."""
    text, count = re.subn(f"({before}).*$", rf"\g<1>{value}", text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(f"the chart has {count} lines for {value}")
    return text


def main(arguments: Sequence[str]) -> int:
    """Check the tag, and write the images into the chart's values where they are given."""
    parser = argparse.ArgumentParser(prog="python -m release.chart", description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--operator", metavar="REPOSITORY@DIGEST")
    parser.add_argument("--trainer", metavar="REPOSITORY@DIGEST")
    given = parser.parse_args(arguments)
    if bool(given.operator) != bool(given.trainer):
        parser.error("give --operator and --trainer, or neither")
    try:
        check_versions(given.tag)
        if given.operator:
            for name, change in (("values.yaml", with_images), ("Chart.yaml", with_list)):
                file = CHART / name
                file.write_text(change(file.read_text(), given.operator, given.trainer))
    except ReleaseError as error:
        print(f"release.chart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
