"""Serves the pages of a source on the loopback interface, until Ctrl-C."""

import asyncio
import secrets

from aiohttp import web

from disttrain.errors import CommandError
from disttrain.output import print_stderr, show
from disttrain_dashboard.app import application
from disttrain_dashboard.source import Source

ADDRESS = "127.0.0.1"
_MAX_HEAD = 8190


def serve(source: Source, port: int) -> int:
    """Serve until Ctrl-C. The address that is printed holds the token. Raises CommandError where the port is taken."""
    asyncio.run(_serve(source, port, secrets.token_urlsafe(32)))
    return 0


async def _serve(source: Source, port: int, token: str) -> None:
    runner = web.AppRunner(application(source, token), access_log=None, max_line_size=_MAX_HEAD, shutdown_timeout=1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, ADDRESS, port).start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CommandError(f"cannot listen on port {port}: {reason}; --port 0 takes any that is free") from error
        show(f"http://{ADDRESS}:{runner.addresses[0][1]}/#token={token}")
        print_stderr(f"{source.title}; open this address in a browser. Ctrl-C ends it")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
