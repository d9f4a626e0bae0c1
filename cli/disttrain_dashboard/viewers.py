"""Readers who each show a token of their own, with which the jobs are read: their rights decide, this server has none.

A token that the source has accepted is remembered, with an allowance of requests. All others share one, so guesses of
tokens do not delay anybody whose token is known.
"""

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from aiohttp import web

from disttrain_dashboard.readers import Reader
from disttrain_dashboard.source import Source, SourceError, UnknownJobError

Open: TypeAlias = Callable[[str, tuple[str, ...]], Source]
"""Makes a source of a token, and of the namespaces whose jobs are listed (none: all)."""

MAX_NAMESPACES = 20
_TOKEN = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*)", re.IGNORECASE)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LISTS_KEPT = 4
_NO_TOKEN = "a token of the cluster is needed: `kubectl create token` makes one for a service account"
_NOT_ACCEPTED = "the cluster does not accept this token: it is wrong, or has expired"
_BUSY = "too many requests at once: the page tries again"


@dataclass(frozen=True)
class Limits:
    """What a reader may ask for. A page asks once in two seconds, and once more for a log."""

    per_second: float = 10.0
    burst: float = 50.0
    """Requests that may come at one moment."""
    at_once: int = 2
    """Requests of one reader for which the source is asked at the same time; others wait."""
    waiting: int = 16
    """Requests of one reader that are answered or wait."""
    readers: int = 256
    """Tokens that are remembered."""


class _Allowance:
    """Requests that may still come, and those under way: of one reader, or of all whose token is not known."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._left, self._at, self._waiting = limits.burst, clock(), 0
        self._turn = asyncio.Semaphore(limits.at_once)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Count a request and wait for its turn. Raises SourceError where it is one too many."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._limits.per_second, self._limits.burst)
        self._at = now
        if self._left < 1 or self._waiting >= self._limits.waiting:
            raise SourceError(_BUSY, 429)
        self._left -= 1
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1


@dataclass
class _Viewer:
    """A token's readers, by the namespaces that are listed."""

    token: str
    allowance: _Allowance
    readers: OrderedDict[tuple[str, ...], Reader] = field(default_factory=OrderedDict)
    ended: bool = False
    """The token was refused meanwhile."""

    def reader(self, namespaces: tuple[str, ...], open_: Open) -> Reader:
        if namespaces not in self.readers:
            self.readers[namespaces] = Reader(open_(self.token, namespaces))
        self.readers.move_to_end(namespaces)
        if len(self.readers) > _LISTS_KEPT:
            self.readers.popitem(last=False)
        return self.readers[namespaces]


class Viewers:
    """All who show a token."""

    asks_for_token = True

    def __init__(
        self,
        open_: Open,
        namespaces: Sequence[str] = (),
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """namespaces: whose jobs are listed where a request names none; none: all."""
        self._open, self._namespaces = open_, tuple(namespaces)
        self._limits, self._clock = limits or Limits(), clock
        self._known: OrderedDict[bytes, _Viewer] = OrderedDict()
        self._strangers = _Allowance(self._limits, clock)

    @asynccontextmanager
    async def reading(self, request: web.Request) -> AsyncIterator[Reader]:
        """Return the reader whose token the request shows. Raises SourceError."""
        token = _token(request)
        namespaces = self._listed(request)
        digest = hashlib.sha256(token.encode()).digest()
        viewer = self._known.get(digest) or _Viewer(token, self._strangers)
        async with viewer.allowance.taken():
            try:
                yield viewer.reader(namespaces, self._open)
            except UnknownJobError:
                self._accepted(digest, viewer)
                raise
            except SourceError as error:
                if error.status == 401:
                    viewer.ended = True
                    self._known.pop(digest, None)
                    raise SourceError(_NOT_ACCEPTED, 401, "token") from error
                if error.status == 403:
                    self._accepted(digest, viewer)
                    raise SourceError(str(error), 403, "namespaces" if _is_list(request) else "") from error
                raise
            self._accepted(digest, viewer)

    def _accepted(self, digest: bytes, viewer: _Viewer) -> None:
        """The source knows the token: from now on it has an allowance of its own."""
        if viewer.ended:
            return
        if digest not in self._known:
            self._known[digest] = _Viewer(viewer.token, _Allowance(self._limits, self._clock), viewer.readers)
        self._known.move_to_end(digest)
        if len(self._known) > self._limits.readers:
            self._known.popitem(last=False)

    def _listed(self, request: web.Request) -> tuple[str, ...]:
        if not _is_list(request):
            return ()
        given = [name for name in request.query.get("namespaces", "").split(",") if name]
        if len(given) > MAX_NAMESPACES:
            raise SourceError(f"{MAX_NAMESPACES} namespaces are listed at most, not {len(given)}", 400, "namespaces")
        if wrong := next((name for name in given if not _NAMESPACE.fullmatch(name)), None):
            raise SourceError(f"'{wrong}' is no name of a namespace", 400, "namespaces")
        return tuple(sorted(set(given))) or self._namespaces


def _is_list(request: web.Request) -> bool:
    return request.path.endswith("/jobs")


def _token(request: web.Request) -> str:
    match = _TOKEN.fullmatch(request.headers.get("Authorization", ""))
    if match is None:
        raise SourceError(_NO_TOKEN, 401, "token")
    return match[1]
