"""A collection in pages, each bounded in bytes, stepping over the objects that cannot be decoded.

A page that is too large is asked for again with fewer objects, down to one. Where that one is too large, its metadata
alone is asked for, which has the same continue token. A page that cannot be decoded is taken apart into its objects,
in a thread: it costs no further request, however many of its objects cannot be read.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import orjson

from disttrain_operator.kube.client import Client, Query, Raw
from disttrain_operator.kube.errors import TooLarge, Unavailable
from disttrain_operator.kube.tolerant import Malformed, Unreadable, identity_of, read_identity, walk, why_not

# Parsed, a text of nothing but brackets is about twenty times as large.
MAX_PAGE_BYTES = 8 * 2**20
# An API server stores at most 1.5 MiB of an object unless it is set up otherwise; as text it can be somewhat longer.
MAX_OBJECT_BYTES = 4 * 2**20
TOO_LARGE = f"it is larger than {MAX_OBJECT_BYTES // 2**20} MiB"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_SMALLER, _LARGER = 8, 2


@dataclass
class Page:
    """A part of a collection."""

    version: int
    """resourceVersion of the whole collection."""
    following: str
    """Token of the next page; empty on the last one."""
    objects: list[Raw] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)


async def list_pages(
    client: Client, path: str, query: Query, chunk: int = 500, *, max_page_bytes: int = MAX_PAGE_BYTES
) -> AsyncIterator[Page]:
    """Yield a collection in pages, all of one resourceVersion. Expired when the server has dropped it meanwhile."""
    limit, place = chunk, dict[str, str]()
    while True:
        page_query = {**query, **place, "limit": str(limit)}
        try:
            body = await client.read(path, page_query, max_page_bytes if limit > 1 else MAX_OBJECT_BYTES)
        except TooLarge:
            if limit > 1:
                limit = max(1, limit // _SMALLER)
                continue
            body = await client.read(path, page_query, MAX_OBJECT_BYTES, accept=METADATA_ONLY)
            page = await read_page(body, path)
            page = _without(page, TOO_LARGE)
        else:
            page = await read_page(body, path)
        yield page
        if not page.following:
            return
        place = {"continue": page.following}
        limit = min(chunk, limit * _LARGER)


async def read_page(body: bytes, path: str) -> Page:
    """Return the page that an answer holds. Raises Unavailable where it holds none."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        why = why_not(error)
    else:
        try:
            metadata = parsed["metadata"]
            return Page(int(metadata["resourceVersion"]), metadata.get("continue") or "", parsed.get("items") or [])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"GET {path}: the answer is no list") from error
    try:
        return await asyncio.to_thread(_take_apart, body, why)
    except Malformed as error:
        raise Unavailable(f"GET {path}: the answer is no list: {why}") from error


def _take_apart(body: bytes, why: str) -> Page:
    version, following, items = "", "", []
    for path, begin, end in walk(body, 2):
        match path:
            case (b"metadata", b"resourceVersion"):
                version = orjson.loads(body[begin:end])
            case (b"metadata", b"continue"):
                following = orjson.loads(body[begin:end])
            case (b"items", b""):
                items.append((begin, end))
    if not version.isdecimal():
        raise Malformed("it has no resourceVersion")
    page = Page(int(version), following)
    for begin, end in items:
        text = body[begin:end]
        try:
            page.objects.append(orjson.loads(text))
        except orjson.JSONDecodeError as error:
            found = read_identity(text, why_not(error))
            if found is not None:
                page.unreadable.append(found)
    return page


def _without(page: Page, why: str) -> Page:
    """Return the page with all of its objects left out."""
    found = (identity_of(raw, why) for raw in page.objects)
    return Page(page.version, page.following, [], [*page.unreadable, *(entry for entry in found if entry is not None)])
