"""The dashboard in a real browser: many jobs, many ranks, what changes meanwhile, keys alone, and a small screen."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from disttrain_dashboard.app import application
from disttrain_dashboard.source import Rank
from disttrain_dashboard.views.curves import Curves
from tests.needs import NO_BROWSER
from tests.unit.dashboard.jobs import EVIL, TIME, Jobs, a_dashboard_job
from tests.waiting import GENEROUS
from tools.chromium import Page, browser, program

pytestmark = pytest.mark.skipif(program() is None, reason=NO_BROWSER)

RANKS = 2000
SHOWN = "document.querySelectorAll('tbody tr').length"


class Server:
    """The application on a port that it keeps."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._runner: web.AppRunner | None = None
        self.unchanged = asyncio.Event()
        """An answer was that nothing has changed."""

    async def _look(self, _: web.Request, response: web.StreamResponse) -> None:
        if response.status == 304:
            self.unchanged.set()

    async def start(self, token: str = "first") -> str:
        """Serve, and return the address with the token."""
        app = application(self.jobs, token)
        app.on_response_prepare.append(self._look)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        return f"http://127.0.0.1:{self.port}/#token={token}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


@asynccontextmanager
async def opened(jobs: Jobs) -> AsyncIterator[tuple[Page, Server]]:
    """The page in a browser. Whatever breaks its policy or throws fails the test."""
    server = Server(jobs)
    async with browser() as page:
        try:
            await page.size(1280, 900)
            await page.open(await server.start())
            await page.until(f"{SHOWN} > 0")
            yield page, server
            assert page.problems == []
        finally:
            await server.stop()


def many(count: int) -> Jobs:
    jobs = [
        a_dashboard_job(f"job-{number:04}", phase="Failed" if number % 10 == 0 else "Running")
        for number in range(count)
    ]
    return Jobs(*jobs)


def large() -> Jobs:
    """A job of many ranks, with curves."""
    jobs = Jobs(a_dashboard_job(worldSize=RANKS, mesh="dp2000"))
    jobs.ranks = {rank: Rank(f"pod-{rank // 8}", f"node-{rank // 8}", "running", 30) for rank in range(RANKS)}
    jobs.ranks[1234] = Rank("pod-154", "node-154", "failed", 29)
    curves = Curves()
    curves.add_lines(
        {"step": step, "loss_metrics/global_avg_loss": 1 / step, "throughput(sps)": step} for step in range(1, 500)
    )
    jobs.panels = curves.panels()
    return jobs


async def test_a_thousand_jobs_are_listed_filtered_and_sorted() -> None:
    async with opened(many(1000)) as (page, _):
        assert await page.value("document.querySelector('.summary').textContent") == "1,000 jobs, 900 running"
        assert await page.value("location.hash") == "#/"
        assert await page.value(SHOWN) < 400
        await page.value("document.querySelector('.more').scrollIntoView()")
        await page.until(f"{SHOWN} >= 200")
        await page.value("document.getElementById('filter').focus()")
        await page.type("failed job-00")
        await page.until(f"{SHOWN} === 10")
        await page.value("document.querySelector('th.name-cell button').click()")
        first = "document.querySelector('tbody tr a').textContent"
        assert await page.value(first) == "job-0000"
        await page.value("document.querySelector('th.name-cell button').click()")
        assert await page.value(first) == "job-0090"
        assert await page.value("document.querySelector('th.name-cell').getAttribute('aria-sort')") == "descending"


async def test_a_job_of_two_thousand_ranks() -> None:
    async with opened(large()) as (page, _):
        await page.value("document.querySelector('tbody a').click()")
        await page.until(f"document.querySelectorAll('.cell').length === {RANKS}")
        assert await page.value("document.querySelectorAll('.cell[data-state=f]').length") == 1
        await page.value("document.querySelector('.cell[data-state=f]').click()")
        about = await page.value("document.querySelector('.about').textContent")
        assert about == "Rank 1234: failed, pod pod-154, node node-154, step 29"
        assert await page.value("document.querySelectorAll('.chart polyline').length") == 2
        label = await page.value("document.querySelector('.chart svg').getAttribute('aria-label')")
        assert label.startswith("Loss over steps. training 0.002004 at step 499")
        for label, shown in (("Show its log", "line 999"), ("Show its stacks", "line 9 in step")):
            button = f"[...document.querySelectorAll('button')].find((one) => one.textContent === '{label}')"
            await page.value(f"{button}.click()")
            await page.until(
                f"[...document.querySelectorAll('pre.log')].some((one) => one.textContent.includes('{shown}'))"
            )


async def test_what_changes_is_shown_and_a_server_that_is_gone_is_awaited() -> None:
    jobs = Jobs(a_dashboard_job())
    async with opened(jobs) as (page, server):
        phase = "document.querySelector('tbody .phase').textContent"
        assert await page.value(phase) == "Running"
        await asyncio.wait_for(server.unchanged.wait(), GENEROUS)
        await page.value("document.querySelector('tbody a').focus()")
        jobs.known["default/digits"] = a_dashboard_job(phase="Failed")
        jobs.known["default/new"] = a_dashboard_job("new")
        await page.until(f"{SHOWN} === 2")
        assert await page.value("document.activeElement.textContent") == "digits"

        await server.stop()
        await page.until("document.getElementById('link').textContent.startsWith('The server does not answer')")
        assert await page.value("document.body.classList.contains('away')")
        del jobs.known["default/digits"]
        await server.start()
        await page.until(f"{SHOWN} === 1 && document.getElementById('link').textContent === ''")

        await server.stop()
        await server.start("second")
        await page.until("document.getElementById('link').textContent.includes('open the address that was printed')")
        # As another tab does that opens the new address.
        await page.value("location.hash = '#token=second'")
        await page.until("document.getElementById('link').textContent === ''")


async def test_keys_alone_lead_everywhere() -> None:
    async with opened(large()) as (page, _):
        focused = "document.activeElement"
        await page.press("Tab")
        assert await page.value(f"{focused}.className") == "skip"
        for _ in range(20):
            await page.press("Tab")
            if await page.value(f"{focused}.matches('tbody a')"):
                break
        await page.press("Enter")
        await page.until("document.querySelector('.cell') !== null")
        for _ in range(20):
            await page.press("Tab")
            if await page.value(f"{focused}.matches('.cell')"):
                break
        for key, rank in (("ArrowRight", 1), ("End", RANKS - 1), ("ArrowLeft", RANKS - 2), ("Home", 0)):
            await page.press(key)
            assert await page.value(f"Number({focused}.dataset.rank)") == rank
        await page.press("ArrowDown")
        below = await page.value(f"Number({focused}.dataset.rank)")
        assert 10 < below < 200
        await page.press("Enter")
        assert await page.value("document.querySelector('.about').textContent") == (
            f"Rank {below}: running, pod pod-{below // 8}, node node-{below // 8}, step 30"
        )
        await page.press("Tab")
        assert await page.value(f"{focused}.textContent") == "Show its log"
        await page.press("Tab", shift=True)
        assert await page.value(f"Number({focused}.dataset.rank)") == below


@pytest.mark.parametrize("width", [360, 768])
async def test_nothing_is_wider_than_a_small_screen(width: int) -> None:
    jobs = large()
    jobs.known["default/digits"].raw["metadata"]["name"] = "a" * 60
    async with opened(jobs) as (page, _):
        await page.size(width, 700, dark=True)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.value(overflow) == 0
        await page.value("document.querySelector('tbody a').click()")
        await page.until("document.querySelector('.cell') !== null")
        assert await page.value(overflow) == 0
        dark = "getComputedStyle(document.body).backgroundColor"
        assert await page.value(dark) == "rgb(20, 23, 27)"


async def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    evil: dict[str, Any] = {"reason": EVIL, "message": EVIL}
    jobs = Jobs(a_dashboard_job(phase=EVIL, mesh=EVIL, attempts=[{"number": 1, "startTime": TIME, "verdict": evil}]))
    jobs.ranks, jobs.lines = {0: Rank(EVIL, EVIL, "failed")}, [EVIL]
    async with opened(jobs) as (page, _):
        await page.value("document.querySelector('tbody a').click()")
        await page.until("document.querySelector('.cell') !== null")
        await page.value("document.querySelector('.cell').click()")
        await page.value("document.querySelector('main form button').click()")
        await page.until("document.querySelector('pre.log').textContent.includes('onerror')")
        assert await page.value("document.querySelectorAll('main img, main script').length") == 0
        assert "<img src=x onerror=alert(1)>" in await page.value("document.querySelector('.attempts').textContent")
        # Even code of ours could not make markup of a text.
        with pytest.raises(RuntimeError, match="TrustedHTML"):
            await page.value("document.querySelector('main').innerHTML = '<b>x</b>'")
        page.problems.clear()


async def test_a_job_that_was_deleted_is_marked_and_has_no_log() -> None:
    gone = replace(a_dashboard_job("old", "default/old/uid", phase="Succeeded"), deleted=True)
    async with opened(Jobs(gone, a_dashboard_job())) as (page, _):
        assert await page.value("document.querySelector('.summary').textContent") == "2 jobs, 1 running, 1 deleted"
        await page.value("document.getElementById('filter').focus()")
        await page.type("deleted")
        await page.until(f"{SHOWN} === 1")
        assert await page.value("document.querySelector('tbody th').innerText") == "old deleted"
        await page.value("document.querySelector('tbody a').click()")
        await page.until("document.querySelector('h1')?.textContent === 'old'")
        hidden = "['Log', 'Ranks'].map((name) => document.querySelector(`section[aria-label=${name}]`).hidden).join()"
        assert await page.value(hidden) == "true,true"


async def test_without_the_token_nothing_is_shown() -> None:
    jobs = Jobs(a_dashboard_job())
    server = Server(jobs)
    async with browser() as page:
        try:
            address = await server.start()
            await page.open(address.partition("#")[0])
            await page.until("document.getElementById('link')?.textContent.includes('token')")
            assert await page.value(SHOWN) == 0
            assert jobs.asked == []
        finally:
            await server.stop()
