"""A collection in pages, each bounded in bytes and in memory, stepping over the objects that cannot be decoded.

A page that is too large is asked for again with fewer objects, down to one; so is one that would take too much memory
as objects, which its text shows before it is parsed. Where that one is too large, its metadata alone is asked for,
which has the same continue token. A page that cannot be decoded is taken apart into its objects: it costs no further
request, however many of its objects cannot be read.

Pages are parsed in a thread, one at a time in the whole process, and what is to be kept of their objects is taken from
them there: nobody holds a parsed page while the next one is parsed, and the loop goes on meanwhile.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from disttrain_operator.kube.client import TOO_MANY_PARTS, Client, Query, Raw
from disttrain_operator.kube.errors import TooLarge, Unavailable
from disttrain_operator.kube.one_at_a_time import in_thread, place_for_a_page
from disttrain_operator.kube.sizes import MAX_PARSED_BYTES, parsed_size
from disttrain_operator.kube.tolerant import Malformed, Unreadable, read_identity, refused, walk, why_not

MAX_PAGE_BYTES = 4 * 2**20
# An API server stores at most 1.5 MiB of an object unless it is set up otherwise; as text it can be somewhat longer.
MAX_OBJECT_BYTES = 4 * 2**20
TOO_LARGE = f"it is larger than {MAX_OBJECT_BYTES // 2**20} MiB"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_SMALLER, _LARGER, _PAGES_BEFORE_LARGER = 8, 2, 8

Trim = Callable[[Raw], Raw]
Unread = Callable[[Any, Exception], Unreadable | None]


@dataclass
class Page:
    """A part of a collection."""

    version: int
    """resourceVersion of the whole collection."""
    following: str
    """Token of the next page; empty on the last one."""
    objects: list[Raw] = field(default_factory=list)
    """What is kept of them."""
    unreadable: list[Unreadable] = field(default_factory=list)


async def list_pages(
    client: Client,
    path: str,
    query: Query,
    chunk: int = 500,
    *,
    max_page_bytes: int = MAX_PAGE_BYTES,
    trim: Trim = lambda raw: raw,
    unread: Unread = refused,
) -> AsyncIterator[Page]:
    """Yield a collection in pages, all of one resourceVersion. Expired when the server has dropped it meanwhile.

    `trim` and `unread` are called in a thread: what is kept of an object, and what is said of one that `trim` refuses.
    """
    sizes, place = _Sizes(chunk), dict[str, str]()
    while True:
        page_query, limit = {**query, **place, "limit": str(sizes.limit)}, sizes.limit
        async with place_for_a_page():
            try:
                body = await client.read(path, page_query, max_page_bytes if limit > 1 else MAX_OBJECT_BYTES)
            except TooLarge:
                if sizes.can_be_smaller():
                    continue
                body, why = await client.read(path, page_query, MAX_OBJECT_BYTES, accept=METADATA_ONLY), TOO_LARGE
            else:
                why = TOO_MANY_PARTS if parsed_size(body) > MAX_PARSED_BYTES else ""
                if why and sizes.can_be_smaller():
                    continue
            page = await (name_page(body, path, why) if why else read_page(body, path, trim, unread))
            del body
        yield page
        if not page.following:
            return
        place = {"continue": page.following}
        sizes.went_well()


class _Sizes:
    """How many objects the next page is to have."""

    def __init__(self, most: int) -> None:
        self._most, self.limit = most, most
        self._good = self._patience = 0

    def can_be_smaller(self) -> bool:
        """Make it smaller: that page was too large. Returns False where it had one object."""
        if self.limit == 1:
            return False
        if 0 < self._good < self.limit:
            self.limit, self._patience = self._good, _PAGES_BEFORE_LARGER
        else:
            self.limit = max(1, self.limit // _SMALLER)
        return True

    def went_well(self) -> None:
        """Make it larger now and then."""
        self._good = self.limit
        if self._patience:
            self._patience -= 1
        else:
            self.limit = min(self._most, self.limit * _LARGER)


async def read_page(body: bytes, path: str, trim: Trim = lambda raw: raw, unread: Unread = refused) -> Page:
    """Return the page that an answer holds. Raises Unavailable where it holds none."""
    return await in_thread(lambda: _read_page(body, path, trim, unread))


async def name_page(body: bytes, path: str, why: str) -> Page:
    """Return the page with all of its objects left out, for this reason. None of them is parsed."""
    return await in_thread(lambda: _taken_apart(body, path, why, lambda text: None))


def _read_page(body: bytes, path: str, trim: Trim, unread: Unread) -> Page:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        why = why_not(error)
    else:
        try:
            metadata, items = parsed["metadata"], parsed.get("items") or []
            page = Page(int(metadata["resourceVersion"]), metadata.get("continue") or "")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"GET {path}: the answer is not a list") from error
        items.reverse()
        _trim_all(page, (items.pop() for _ in range(len(items))), trim, unread)
        return page
    return _taken_apart(body, path, why, orjson.loads, trim, unread)


def _trim_all(page: Page, objects: Iterator[Raw], trim: Trim, unread: Unread) -> None:
    for raw in objects:
        try:
            page.objects.append(trim(raw))
        except Exception as error:
            found = unread(raw, error)
            if found is not None:
                page.unreadable.append(found)


def _taken_apart(
    body: bytes, path: str, why: str, parse: Callable[[bytes], Any], trim: Trim = dict, unread: Unread = refused
) -> Page:
    try:
        return _take_apart(body, why, parse, trim, unread)
    except Malformed as error:
        raise Unavailable(f"GET {path}: the answer is not a list: {why}") from error


def _take_apart(body: bytes, why: str, parse: Callable[[bytes], Any], trim: Trim, unread: Unread) -> Page:
    """Return the page; an object for which `parse` returns None is left out for this reason."""
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
            raw, reason = parse(text), why
        except orjson.JSONDecodeError as error:
            raw, reason = None, why_not(error)
        if raw is not None:
            _trim_all(page, iter((raw,)), trim, unread)
        elif (found := read_identity(text, reason)) is not None:
            page.unreadable.append(found)
    return page
