"""The documentation site: links and anchors lead somewhere, and reading a page fetches nothing from outside."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_api import manifest
from disttrain_api.names import ExitCode, Reason, exit_reason
from tests.documented import documented_jobs
from tools.cluster.paths import REPOSITORY
from tools.documentation import outside_pages, relinked


def build(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    command = [str(Path(sys.executable).with_name("mkdocs")), "build", "--strict", *options, "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's site: a link that leads nowhere, or a page in no menu, is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize(("page", "complaint"), [("[a](b.md)", "'b.md'"), ("[a](#b)", "'#b'"), ("# whole", None)])
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, page: str, complaint: str | None) -> None:
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(f"INHERIT: {REPOSITORY}/mkdocs.yml\nhooks: []\nnav: [index.md]\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(page)
    done = build(tmp_path / "site", "--config-file", str(settings))
    assert (done.returncode, complaint or "") in ((1, complaint), (0, "")), done.stderr
    assert complaint is None or complaint in done.stderr


def test_the_site_builds_and_fetches_nothing_from_outside(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\bsrc=["']?(?:https?:)?//|class="mermaid"|<link[^>]*href=["']?(?:https?:)?//"""
    )
    assert [page.name for page in pages if loaded.search(page.read_text())] == []
    sheets = [
        sheet for sheet in site.rglob("*.css") if re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text())
    ]
    assert sheets == []


def test_links_out_of_docs_lead_to_pages_of_the_site() -> None:
    pages = {"examples/a.yaml": "examples/a.yaml.md", "helm/disttrain/README.md": "chart.md"}
    text = "[a](../../examples/a.yaml) [b](../x.md#c) [v](../../helm/disttrain/README.md#v) [w](https://a.b/c)"
    assert relinked(text, "docs/start/page.md", "start/page.md", pages) == (
        "[a](../examples/a.yaml.md) [b](../x.md#c) [v](../chart.md#v) [w](https://a.b/c)"
    )
    # A page that lies elsewhere on the site than in the repository.
    assert (
        relinked("[i](../../docs/installing.md)", "helm/disttrain/README.md", "chart.md", pages) == "[i](installing.md)"
    )


def test_every_example_is_on_the_page_of_examples() -> None:
    shown = (REPOSITORY / "docs" / "start" / "examples.md").read_text()
    examples = [source for source in outside_pages(REPOSITORY) if source.startswith("examples/")]
    assert len(examples) > 20
    assert [source for source in examples if f"](../../{source})" not in shown] == []


@pytest.mark.parametrize(("page", "text"), documented_jobs())
def test_every_job_of_the_documentation_is_valid(page: str, text: str) -> None:
    """As `disttrain validate` finds it; tests/integration/test_crd.py asks an API server as well."""
    assert manifest.parse(text, page).kind == "DistTrainingJob"


def test_every_reason_is_on_the_page_of_failures() -> None:
    page = (REPOSITORY / "docs" / "failures.md").read_text()
    section = page[page.index("## Every reason") :]
    reasons = {*map(str, Reason), *map(exit_reason, ExitCode)}
    assert {reason for reason in reasons if f"`{reason}`" not in section} == set()
