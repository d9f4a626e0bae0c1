"""The documentation site: links and anchors lead somewhere, and reading a page fetches nothing from outside."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_api import manifest
from tests.cluster.paths import REPOSITORY
from tests.documented import documented_jobs
from tools.documentation import outside_pages, relinked


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a link that leads nowhere, or a page in no menu, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [str(Path(sys.executable).with_name("mkdocs")), "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


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
