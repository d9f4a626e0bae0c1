"""A replacement of kopf's HTTP session: every request of kopf is answered here.

Lists and watches of jobs are answered by kopf_watch.py. Which kinds there are, kopf asks before it watches: it gets
of the kind that it has a handler for, and of two others that it waits for, so that a replica needs no right to ask.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from yarl import URL

from disttrain_api.names import GROUP, KIND, PLURAL, VERSION
from disttrain_operator.kube.kopf_watch import KopfWatch


def _kinds(name: str, kind: str, *, namespaced: bool = False) -> dict[str, Any]:
    verbs = ["get", "list", "watch"]
    return {"resources": [{"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": verbs}]}


def _group(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


_DEFINITIONS = "apiextensions.k8s.io"
DISCOVERY = {
    "/api": {"versions": ["v1"]},
    "/api/v1": _kinds("namespaces", "Namespace"),
    "/apis": {"groups": [_group(GROUP, VERSION), _group(_DEFINITIONS, "v1")]},
    f"/apis/{GROUP}/{VERSION}": _kinds(PLURAL, KIND, namespaced=True),
    f"/apis/{_DEFINITIONS}/v1": _kinds("customresourcedefinitions", "CustomResourceDefinition"),
}


class Answer:
    """An answer to kopf: what it uses of aiohttp.ClientResponse."""

    status = 200

    def __init__(self, document: Mapping[str, Any] | None = None, lines: AsyncIterator[bytes] | None = None) -> None:
        self._document, self._lines = document, lines

    @property
    def content(self) -> Self:
        return self

    async def json(self) -> Mapping[str, Any] | None:
        return self._document

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        assert self._lines is not None
        async for line in self._lines:
            yield line

    def close(self) -> None:
        """Whoever reads the lines ends them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Same as `close`."""


class KopfSession:
    """The part of aiohttp.ClientSession that kopf uses. `watches`: by path."""

    def __init__(self, watches: Mapping[str, KopfWatch]) -> None:
        self._watches = watches
        self.headers = dict[str, str]()
        self.closed = False

    async def request(self, *, method: str, url: str, **_: object) -> Answer:
        """Raises ValueError for a request that kopf has no reason to make: it is to watch jobs, and nothing else."""
        at = URL(url)
        if method.upper() == "GET" and at.path in DISCOVERY:
            return Answer(DISCOVERY[at.path])
        if method.upper() != "GET" or at.path not in self._watches:
            raise ValueError(f"kopf asks for {method} {at.path}")
        watch = self._watches[at.path]
        if at.query.get("watch") == "true":
            return Answer(lines=watch.events())
        return Answer(await watch.page(following=bool(at.query.get("continue"))))

    async def close(self) -> None:
        self.closed = True
