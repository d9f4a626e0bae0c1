"""The dashboard of a cluster in a real browser, before a real API server: tokens, rights, and outages."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.browser.viewer import LINK, NAMES, enter, loaded_anew
from tests.integration.dashboard_process import a_viewer, progress, running_dashboard
from tests.integration.operator_process import Team, install_crd
from tests.needs import NO_BROWSER
from tools.chromium import Page, browser, program
from tools.cluster.control_plane import ControlPlane

pytestmark = [
    pytest.mark.skipif(program() is None, reason=NO_BROWSER),
    # From cold, the programs of the API server are built first.
    pytest.mark.timeout(1800),
]
MANY = 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        install_crd(started.api)
        for name in ("team-a", "team-b"):
            Team(started.api, name).create(f"job-of-{name}")
        yield started


@asynccontextmanager
async def opened(cluster: ControlPlane, folder: Path) -> AsyncIterator[Page]:
    """The page, which asks for a token. Whatever breaks its policy or throws fails the test."""
    with running_dashboard(cluster, folder) as address:
        async with browser() as page:
            await page.open(address)
            await page.until("document.activeElement?.id === 'token'")
            yield page
            assert page.problems == []


async def test_two_viewers_see_what_each_may_see(cluster: ControlPlane, tmp_path: Path) -> None:
    ann, bob = (a_viewer(cluster.api, name, "viewer") for name in ("team-a", "team-b"))
    async with opened(cluster, tmp_path) as page:
        await enter(page, ann, "")
        await page.until(f"{LINK}.includes('cannot list jobs of all namespaces')")
        assert await page.value("document.activeElement.id") == "namespaces"
        assert await page.value(NAMES) == ""

        await enter(page, "", "team-a team-b")
        await page.until(f"{NAMES} === 'job-of-team-a' && {LINK} === ''")
        note = await page.value("document.querySelector('.list .note').textContent")
        assert 'in the namespace "team-b"' in note
        await page.value("document.querySelector('tbody a').click()")
        await page.until("document.querySelector('h1').textContent === 'job-of-team-a'")
        await page.value("location.hash = '#/job/team-b%2Fjob-of-team-b'")
        await page.until(f"{LINK}.includes('cannot read team-b/job-of-team-b')")
        assert await page.value("document.querySelector('.job').hidden")

        assert await page.value("localStorage.getItem('disttrain-token')") is None, "it ends with the tab"
        assert ann not in await page.value("location.href + document.body.innerHTML")
        await page.value("location.hash = '#/'")
        await page.value("window.before = true")
        forget = "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Forget the token')"
        await page.value(f"{forget}.click()")
        await loaded_anew(page)
        await page.until(f"document.activeElement.id === 'token' && {LINK} !== ''")
        assert await page.value(NAMES) == ""
        await enter(page, bob, "team-a,team-b")
        await page.until(f"{NAMES} === 'job-of-team-b'")


async def test_a_wrong_token_and_one_that_has_ended(cluster: ControlPlane, tmp_path: Path) -> None:
    token = a_viewer(cluster.api, "team-a", "leaves")
    async with opened(cluster, tmp_path) as page:
        for wrong in ("nonsense", token[:-8] + "AAAAAAAA"):
            await enter(page, wrong, "team-a")
            await page.until(f"{LINK}.includes('it is wrong, or has expired')")
            assert await page.value(NAMES) == ""
            assert await page.value("document.querySelector('.access').hidden") is False
        await enter(page, token, "team-a")
        await page.until(f"{NAMES} === 'job-of-team-a'")
        assert await page.value("document.querySelector('.access').hidden") is True
        cluster.api.ask("DELETE", "/api/v1/namespaces/team-a/serviceaccounts/leaves")
        await page.until(f"{LINK}.includes('it is wrong, or has expired')")
        assert await page.value("document.activeElement.id") == "token"


async def test_a_thousand_jobs_change_and_an_api_server_that_is_away_is_awaited(
    cluster: ControlPlane, tmp_path: Path
) -> None:
    many = Team(cluster.api, "many")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many.create, [f"job-{number:04}" for number in range(MANY)]))
    token = a_viewer(cluster.api, "many", "viewer")
    async with opened(cluster, tmp_path) as page:
        await enter(page, token, "many")
        await page.until("document.querySelector('.summary').textContent.startsWith('1,000 jobs')")
        progress(cluster.api, "many", "job-0123", "Running", 5)
        await page.until("document.querySelector('.summary').textContent === '1,000 jobs, 1 running'")
        cluster.kill_api_server()
        try:
            await page.until(f"{LINK}.includes('the cluster does not answer')")
            assert await page.value("document.body.classList.contains('away')")
            assert await page.value("document.querySelectorAll('tbody tr').length") > 0
        finally:
            cluster.start_api_server()
        progress(cluster.api, "many", "job-0123", "Running", 9)
        await page.until(f"{LINK} === '' && document.querySelector('tbody tr').textContent.includes('9/100')")
        await page.value("document.querySelector('tbody a').click()")
        await page.until("document.querySelectorAll('.chart polyline').length > 0")
