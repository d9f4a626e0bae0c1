"""Chromium without a window, driven over its own protocol (DevTools): for tests of pages, and pictures of them."""

import asyncio
import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_KEYS = {
    "Enter": 13,
    "Tab": 9,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "End": 35,
    "Home": 36,
}


def program() -> str | None:
    """Return the browser's path; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.problems: list[str] = []
        """What the browser has complained about: exceptions, and breaches of the page's policy."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises RuntimeError where it is refused."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.receive_str(), _SECONDS))
            self._look(message)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])

    def _look(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        entry = message.get("params", {}).get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry.get("source") in ("security", "violation"):
            self.problems.append(str(entry["text"]))

    async def open(self, address: str) -> None:
        """Go to an address."""
        await self.call("Page.navigate", url=address)

    async def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript comes to. Raises RuntimeError where it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return it. Raises TimeoutError."""
        found = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS):
                while not (found := await self.value(expression)):  # noqa: ASYNC110 - what changes is a page
                    await asyncio.sleep(_LOOK_SECONDS)
        if not found:
            raise TimeoutError(f"never: {expression}; the page says: {await self.value('document.body.innerText')}")
        return found

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key and let it go."""
        text = {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 * shift}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def type(self, text: str) -> None:
        """Insert a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Show the page in a window of this size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Start Chromium with a profile of its own, and end both. Raises RuntimeError where it does not start."""
    found = program()
    if found is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            found, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, env=os.environ | {"HOME": profile},
        )  # fmt: skip
        try:
            port = await _port(process, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [target for target in await answer.json() if target["type"] == "page"]
                address = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=2**28) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                    with suppress(TimeoutError, RuntimeError, TypeError, aiohttp.ClientError):
                        await page.call("Browser.close")
        finally:
            # Its children end with it.
            with suppress(ProcessLookupError, TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process, file: Path) -> str:
    async with asyncio.timeout(_SECONDS):
        while not file.exists() or not file.read_text().strip():
            if process.returncode is not None:
                raise RuntimeError(f"the browser ended with exit code {process.returncode}")
            await asyncio.sleep(_LOOK_SECONDS)
    return file.read_text().split("\n")[0]
