"""Hooks of mkdocs: pages of the site that are other files of the repository, and links to them.

The pages of docs/ are read on the site and in the repository. There they link to examples, to the chart and to other
files by their paths, so each of these files becomes a page of the site and each link leads to that page.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
_WHOLE_PAGES = {
    "helm/disttrain/README.md": "chart.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
_MONITORING = {f"helm/disttrain/monitoring/{name}": f"monitoring/{name}.md" for name in ("alerts.yaml", "board.json")}
_LANGUAGES = {".yaml": "yaml", ".py": "python", ".json": "json"}
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def outside_pages(repository: Path) -> dict[str, str]:
    """Return the page of the site for each file outside docs/ that has one, both as paths with slashes."""
    files = sorted(path for path in (repository / "examples").rglob("*") if path.suffix in (".md", *_LANGUAGES))
    examples = [path.relative_to(repository).as_posix() for path in files]
    pages = {example: example if example.endswith(".md") else f"{example}.md" for example in examples}
    return _WHOLE_PAGES | _MONITORING | pages


def text_of(repository: Path, source: str) -> str:
    """Return the markdown of the page of a file: itself, or a heading and the file as a block of code."""
    path = repository / source
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {source}\n\n```{_LANGUAGES[path.suffix]}\n{text.rstrip()}\n```\n"


def relinked(markdown: str, source: str, page: str, pages: Mapping[str, str]) -> str:
    """Return a page's markdown with its links as the site needs them.

    source: the file's path in the repository, which its links are relative to; page: the page's path on the site;
    pages: `outside_pages`. A link to a file that has no page stays as it is, and mkdocs complains of it.
    """

    def target(match: re.Match[str]) -> str:
        opening, link, anchor, closing = match.group(1), match.group(2), match.group(3) or "", match.group(4)
        if "://" in link or link.startswith("mailto:"):
            return match.group(0)
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        found = pages.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if found is None:
            return match.group(0)
        return f"{opening}{posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor}{closing}"

    return _LINK.sub(target, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/."""
    for source, page in outside_pages(REPOSITORY).items():
        files.append(File.generated(config, page, content=text_of(REPOSITORY, source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's markdown with links that lead to pages of the site."""
    pages = outside_pages(REPOSITORY)
    sources = {target: source for source, target in pages.items()}
    uri = page.file.src_uri
    return relinked(markdown, sources.get(uri, f"docs/{uri}"), uri, pages)
