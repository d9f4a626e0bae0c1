"""Write docs/dashboard.png, a picture of a run's page: `python -m tools.dashboard_picture RUNS [KEY]`.

RUNS: a folder of `disttrain run`. KEY: the name of a run's folder in it; absent, the list. With `--to FOLDER` before,
pictures of the list and of the page, light, dark and on a small screen, to look at.
"""

import asyncio
import io
import sys
from pathlib import Path

from aiohttp import web
from PIL import Image

from disttrain.dashboard.runs import LocalRuns
from disttrain_dashboard.app import application
from tools.chromium import Page, browser

PICTURE = Path(__file__).parents[1] / "docs" / "dashboard.png"
_COLOURS = 96
_READY = "document.querySelector('tbody tr, .job:not([hidden])') !== null"


async def picture(page: Page, address: str, key: str, path: Path, width: int, *, dark: bool = False) -> None:
    """Write one picture."""
    await page.size(width, 900, dark=dark)
    await page.open(f"{address}#/job/{key}" if key else f"{address}#/")
    await page.until(_READY)
    await asyncio.sleep(1)
    await page.picture(path, whole=True)
    with Image.open(io.BytesIO(path.read_bytes())) as full:
        full.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


async def main(arguments: list[str]) -> None:
    """Serve the runs, and draw."""
    folder = Path(arguments[1]) if arguments[:1] == ["--to"] else None
    runs, *keys = arguments[2 if folder else 0 :]
    runner = web.AppRunner(application(LocalRuns(Path(runs)), "token"), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    async with browser() as page:
        await page.open(f"{address}#token=token")
        await page.until(_READY)
        if folder is None:
            await picture(page, address, keys[0] if keys else "", PICTURE, 1100)
        else:
            for key in ("", *keys):
                for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("small", 380, False)):
                    await picture(page, address, key, folder / f"{key or 'list'}-{name}.png", width, dark=dark)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
