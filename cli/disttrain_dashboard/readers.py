"""Who reads: a person with the jobs that it may see. What the application needs to know of that."""

import itertools
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from disttrain_dashboard.source import Source

_numbers = itertools.count()


@dataclass(frozen=True)
class Reader:
    """Somebody who reads, and the jobs as it may see them."""

    source: Source
    number: int = field(default_factory=lambda: next(_numbers))
    """What was answered is kept under it; it is never given to another."""


class Readers(Protocol):
    """All who may read."""

    asks_for_token: bool
    """Whether each shows a token of its own, which the page asks for."""

    def reading(self, request: web.Request) -> AbstractAsyncContextManager[Reader]:
        """Return who has sent the request, while it is answered. Raises SourceError for whom nothing is answered.

        It sees what the source raises meanwhile.
        """
