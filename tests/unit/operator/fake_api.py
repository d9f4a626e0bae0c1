"""An API server in this process: one store, watches with a history, and faults on demand.

Real enough for what clients rely on: names are unique, every write has a higher resourceVersion, a stale PUT and a
DELETE with another uid get 409, a watch begins after the version it names or gets 410. The text DEEP in an
object stands for more levels than parsers take.
"""

import asyncio
import copy
import json
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.builders import merge

Raw = dict[str, Any]
DEEP = "@deep@"
DEPTH = 1100
Refusal = Callable[[str, str, Raw | None], web.Response | None]


def status_object(code: int, reason: str, message: str = "", **details: Any) -> Raw:
    """The Status object of a refusal."""
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message or reason,
        "details": details,
    }


def refusal(code: int, reason: str, message: str = "", headers: dict[str, str] | None = None) -> web.Response:
    """An answer that refuses."""
    return web.json_response(status_object(code, reason, message), status=code, headers=headers)


def encoded(raw: Any) -> str:
    """JSON of `raw`, with all the levels that DEEP stands for."""
    return json.dumps(raw).replace(f'"{DEEP}"', '{"a":' * DEPTH + "1" + "}" * DEPTH)


def _answer_with(raw: Any, status: int = 200) -> web.Response:
    return web.json_response(text=encoded(raw), status=status)


class FakeApi:
    """Use as an async context manager; `url` is its address."""

    def __init__(self) -> None:
        self.version = 100
        self.compacted = 0
        self.objects: dict[str, Raw] = {}
        self.history: list[tuple[int, str, str, Raw]] = []
        self.requests: list[tuple[str, str]] = []
        self.queries: list[dict[str, str]] = []
        """The query of each list that was asked for."""
        self.validated: list[tuple[str, str | None]] = []
        """Method and validation of fields of each write."""
        self.refusals: list[Refusal] = []
        self.watch_answers: list[web.Response] = []
        """Answers to the next watches, instead of a stream."""
        self.faults: list[str] = []
        """What the running watches do next: close, reset, half-line, garbage, silent, or error:<code>."""
        self.watches = 0
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> "FakeApi":
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    # What tests do to the store.

    async def put(self, path: str, **fields: Any) -> Raw:
        """Create or change the object at `path`, as somebody else would."""
        old = self.objects.get(path)
        raw: Raw = copy.deepcopy(old) if old else {"metadata": {"uid": str(uuid.uuid4())}}
        labels = fields.pop("labels", None)
        raw.update(fields)
        raw["metadata"]["name"] = path.rpartition("/")[2]
        if "/namespaces/" in path:
            raw["metadata"]["namespace"] = path.split("/namespaces/")[1].split("/")[0]
        if labels is not None:
            raw["metadata"]["labels"] = labels
        return await self._store(path, raw)

    async def remove(self, path: str) -> None:
        """Delete the object at `path`."""
        raw = copy.deepcopy(self.objects.pop(path))
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        await self._notify("DELETED", path, raw)

    def compact(self) -> None:
        """Forget all history: watches of older versions get 410."""
        self.compacted = self.version
        self.history.clear()

    async def fault(self, name: str) -> None:
        """Have one running watch do this now."""
        self.faults.append(name)
        async with self._changed:
            self._changed.notify_all()

    def asked(self, method: str, part: str = "") -> list[str]:
        """Paths of the requests with this method and this in their path. ASK: a POST of which nothing is kept."""
        return [path for verb, path in self.requests if verb == method and part in path]

    # Answers.

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, method = request.path, request.method
        body = json.loads(await request.read() or b"null")
        watching, asking = request.query.get("watch") == "true", request.query.get("dryRun") == "All"
        self.requests.append(("WATCH" if watching else "ASK" if asking else method, path))
        if method in ("POST", "PUT", "PATCH"):
            self.validated.append((method, request.query.get("fieldValidation")))
        for refuse in list(self.refusals):
            refused = refuse(method, path, body)
            if refused is not None:
                return refused
        if watching:
            return await self._watch(request)
        match method:
            case "GET":
                return self._get(request, path)
            case "POST" if asking:
                taken = f"{path}/{body['metadata']['name']}" in self.objects
                return refusal(409, "AlreadyExists") if taken else _answer_with(body, status=201)
            case "POST":
                return await self._post(path, body)
            case "PUT":
                return await self._put(path, body)
            case "PATCH":
                return await self._patch(path, body)
            case _:
                return await self._delete(path, body)

    def _get(self, request: web.Request, path: str) -> web.Response:
        if path in self.objects:
            return _answer_with(self.objects[path])
        if path.count("/") % 2 == self._collection_depth(path):
            return refusal(404, "NotFound", f"{path} not found")
        self.queries.append(dict(request.query))
        items = [raw for key, raw in sorted(self.objects.items()) if self._within(key, path)]
        first = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or 10**9)
        metadata = {"resourceVersion": str(self.version)}
        if first + limit < len(items):
            metadata["continue"] = str(first + limit)
        # A list of custom resources has its metadata last, as all keys are sorted.
        page = items[first : first + limit]
        if "as=PartialObjectMetadataList" in request.headers["Accept"]:
            page = [{"metadata": raw["metadata"]} for raw in page]
        return _answer_with({"items": page, "metadata": metadata})

    @staticmethod
    def _collection_depth(path: str) -> int:
        return 1 if path.startswith("/apis/") else 0

    @staticmethod
    def _within(key: str, collection: str) -> bool:
        # /api/v1/pods holds /api/v1/namespaces/x/pods/name
        root, _, plural = collection.rpartition("/")
        parts = key.split("/")
        return key.startswith(root + "/") and parts[-2] == plural

    async def _post(self, path: str, body: Raw) -> web.Response:
        target = f"{path}/{body['metadata']['name']}"
        if target in self.objects:
            return refusal(409, "AlreadyExists", f"{target} already exists")
        raw = copy.deepcopy(body)
        raw["metadata"]["uid"] = str(uuid.uuid4())
        return _answer_with(await self._store(target, raw), status=201)

    async def _put(self, path: str, body: Raw) -> web.Response:
        target = path.removesuffix("/status")
        old = self.objects.get(target)
        if old is None:
            return refusal(404, "NotFound")
        if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
            return refusal(409, "Conflict", "the object has been modified")
        raw = copy.deepcopy(old)
        part = "status" if path.endswith("/status") else "spec"
        raw[part] = body[part]
        return _answer_with(await self._store(target, raw))

    async def _patch(self, path: str, body: Raw) -> web.Response:
        old = self.objects.get(path)
        if old is None:
            return refusal(404, "NotFound")
        if body["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
            return refusal(409, "Conflict", "the object has been modified")
        return _answer_with(await self._store(path, merge(old, body)))

    async def _delete(self, path: str, body: Raw | None) -> web.Response:
        old = self.objects.get(path)
        if old is None:
            return refusal(404, "NotFound")
        wanted = ((body or {}).get("preconditions") or {}).get("uid")
        if wanted not in (None, old["metadata"]["uid"]):
            return refusal(409, "Conflict", "the UID in the precondition does not match")
        await self.remove(path)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _store(self, path: str, raw: Raw) -> Raw:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        kind = "MODIFIED" if path in self.objects else "ADDED"
        self.objects[path] = raw
        await self._notify(kind, path, raw)
        return raw

    async def _notify(self, kind: str, path: str, raw: Raw) -> None:
        self.history.append((self.version, kind, path, copy.deepcopy(raw)))
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.watch_answers:
            return self.watch_answers.pop(0)
        position = int(request.query["resourceVersion"])
        if position < self.compacted:
            return refusal(410, "Expired", "too old resource version")
        if "PartialObjectMetadataList" in request.headers["Accept"]:
            # A server takes such a watch, and ends it at its first event.
            return web.Response()
        stream = web.StreamResponse()
        await stream.prepare(request)
        self.watches += 1
        while True:
            for version, kind, path, raw in [entry for entry in self.history if entry[0] > position]:
                position = version
                if not self._within(path, request.path):
                    continue
                line = encoded({"type": kind, "object": raw}).encode() + b"\n"
                if self.faults[:1] == ["half-line"]:
                    self.faults.pop(0)
                    await stream.write(line[: len(line) // 2])
                    return stream
                await stream.write(line)
            if self._fault_is_due():
                return await self._act(request, stream, self.faults.pop(0))
            async with self._changed:
                if not self._fault_is_due() and not any(entry[0] > position for entry in self.history):
                    await self._changed.wait()

    def _fault_is_due(self) -> bool:
        return bool(self.faults) and self.faults[0] != "half-line"

    async def _act(self, request: web.Request, stream: web.StreamResponse, fault: str) -> web.StreamResponse:
        if fault == "close":
            return stream
        if fault == "garbage":
            await stream.write(b'{"type": "ADDED", "object"\n')
        elif fault == "reset":
            request.transport.abort()
        elif fault.startswith("error:"):
            code = int(fault.removeprefix("error:"))
            error = {"type": "ERROR", "object": status_object(code, "Expired" if code == 410 else "InternalError")}
            await stream.write(json.dumps(error).encode() + b"\n")
        await asyncio.sleep(3600)  # silent
        return stream
