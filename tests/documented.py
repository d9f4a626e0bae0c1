"""The commands that README, docs and the chart's notes tell people to type."""

import re
from pathlib import Path

from tools.cluster.paths import REPOSITORY

LLAMA = REPOSITORY / "examples" / "llama" / "README.md"
NOTES = REPOSITORY / "helm" / "disttrain" / "templates" / "NOTES.txt"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r" {2,}# .*")


def pages() -> list[Path]:
    """Return the three READMEs and every page of docs/ and its folders."""
    readmes = [REPOSITORY / "README.md", REPOSITORY / "helm" / "disttrain" / "README.md", LLAMA]
    return [*readmes, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def console_commands(page: Path) -> list[str]:
    """Return the commands of a page's console blocks in order: what follows `$ `, without a comment."""
    return [command for command, _ in console_steps(page)]


def console_steps(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, each with the lines that it is shown to print."""
    steps: list[tuple[str, list[str]]] = []
    for line in (line for block in _BLOCK.findall(page.read_text()) for line in block.splitlines()):
        if line.startswith("$ "):
            steps.append((_COMMENT.sub("", line.removeprefix("$ ")), []))
        else:
            steps[-1][1].append(line)
    return steps


def commands_on_a_cluster() -> list[str]:
    """Return the commands of docs/installing.md, and before it removes everything again those of docs/operating.md."""
    installing, operating = (console_commands(REPOSITORY / "docs" / page) for page in ("installing.md", "operating.md"))
    end = next(at for at, command in enumerate(installing) if command.startswith("helm uninstall"))
    return [*installing[:end], *operating, *installing[end:]]


def notes_commands() -> list[str]:
    """Return the commands that `helm install` prints at its end: the indented lines."""
    return [line.strip() for line in NOTES.read_text().splitlines() if line.startswith("  ")]


def documented_jobs() -> list[tuple[str, str]]:
    """The manifests of whole jobs on the pages, each with the name of its page."""
    blocks = [
        (page.name, block)
        for page in pages()
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    return [(name, block) for name, block in blocks if "kind: DistTrainingJob" in block]
