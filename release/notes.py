"""`python -m release.notes v1.2.3`: prints what CHANGELOG.md says of a version, which a release shows.

With --readme REPOSITORY_ADDRESS, README.md with addresses in its links: a package index has no files beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from release.chart import ReleaseError, check_versions

REPOSITORY = Path(__file__).resolve().parents[1]
_HEADING = re.compile(r"^## +(?P<name>\S+).*$", re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s:]+)\)")


def section(changelog: str, version: str) -> str:
    """Return what stands below the heading of a version. Raises ReleaseError where there is nothing."""
    headings = [*_HEADING.finditer(changelog)]
    for at, heading in enumerate(headings):
        if heading["name"] in (version, f"[{version}]"):
            end = headings[at + 1].start() if at + 1 < len(headings) else len(changelog)
            text = changelog[heading.end() : end].strip()
            if text:
                return text
            raise ReleaseError(f"CHANGELOG.md says nothing below its heading of {version}")
    names = ", ".join(heading["name"] for heading in headings)
    raise ReleaseError(f"CHANGELOG.md has no heading `## {version}`, only {names}: rename `## Unreleased`")


def with_addresses(text: str, address: str, tag: str) -> str:
    """Return Markdown whose links to files lead to them at a host of repositories; images to the files themselves."""

    def absolute(link: re.Match[str]) -> str:
        if link["target"].startswith("#"):
            return link[0]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({address.rstrip('/')}/{kind}/{tag}/{link['target']})"

    return _LINK.sub(absolute, text)


def main(arguments: Sequence[str]) -> int:
    """Print the section of the tag's version, or the README."""
    parser = argparse.ArgumentParser(prog="python -m release.notes", description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--readme", metavar="REPOSITORY_ADDRESS")
    given = parser.parse_args(arguments)
    try:
        check_versions(given.tag)
        if given.readme:
            print(with_addresses((REPOSITORY / "README.md").read_text(), given.readme, given.tag), end="")
        else:
            print(section((REPOSITORY / "CHANGELOG.md").read_text(), given.tag.removeprefix("v")))
    except ReleaseError as error:
        print(f"release.notes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
