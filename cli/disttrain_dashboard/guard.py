"""Who may read the pages: hosts by which the server is called, the token, and the headers of every answer.

The token stands behind `#` in the address that is printed, which no browser sends anywhere, and comes in the header
Authorization: a cookie would go to whatever else listens on this machine.
"""

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Ports are not compared: a tunnel's is another one."""
PREFIX = "/api/"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guard(token: str, hosts: Collection[str]) -> Middleware:
    """Return what lets only requests to these hosts through, and to data only those with the token."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _host(request.headers.get("Host", "")) not in hosts:
            # A page whose name leads here although it is not ours: DNS rebinding.
            return refusal(403, f"this server answers to {', '.join(sorted(hosts))} alone")
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path.startswith(PREFIX) and not hmac.compare_digest(given, expected):
            return refusal(401, "the token is missing, or that of an earlier start: open the address that was printed")
        return await handler(request)

    return check


def refusal(status: int, sentence: str, ask: str = "") -> web.Response:
    """Return an answer that says why there is none, and what the page asks its reader for."""
    return web.json_response({"error": sentence, "ask": ask}, status=status)


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add HEADERS to an answer that is about to be sent."""
    response.headers.update(HEADERS)


def _host(header: str) -> str | None:
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None
