"""A viewer at the page of a cluster's dashboard, which asks for a token."""

import asyncio
from contextlib import suppress

from tests.waiting import GENEROUS
from tools.chromium import Page

LINK = "document.getElementById('link').textContent"
NAMES = "[...document.querySelectorAll('tbody tr a')].map((each) => each.textContent).sort().join()"


async def enter(page: Page, token: str, namespaces: str) -> None:
    """Fill the form and send it, with keys alone; the page loads anew."""
    await page.value("window.before = true")
    for field, text in (("token", token), ("namespaces", namespaces)):
        await page.value(f"document.getElementById('{field}').focus(); document.activeElement.select()")
        await page.type(text)
    await page.press("Enter")
    await loaded_anew(page)


async def loaded_anew(page: Page) -> None:
    """Wait until the page has another document than the one with `window.before`."""
    async with asyncio.timeout(GENEROUS):
        while True:
            # Between two documents there is none to ask.
            with suppress(RuntimeError):
                await page.until("window.before === undefined && document.getElementById('token') !== null")
                return
