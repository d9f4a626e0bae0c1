"""Requests to an API server: urllib3 and orjson, plain dicts in and out, one connection for each thread that asks.

What it answers is read up to a bound, and what it refuses becomes a sentence.
"""

import math
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import urllib3

from disttrain.errors import CommandError
from disttrain_operator.kube.auth import Access, ClientCertificate
from disttrain_operator.kube.errors import AccessError

Raw = dict[str, Any]
Query = Mapping[str, str | int]

MAX_BODY_BYTES = 64 * 2**20
MAX_LINE_BYTES = 4 * 2**20
STRICT: Query = {"fieldValidation": "Strict"}
"""Nothing is left out in silence: an unknown field, or one that stands twice, is refused with its name."""
PAGE = 500
"""Objects that are asked for at once."""
_TIMEOUT = urllib3.Timeout(connect=10, read=60)
# A connection that was never made is tried again; a request that may have arrived is not.
_RETRIES = urllib3.Retry(total=2, connect=2, read=0, redirect=0, status=0, other=0, backoff_factor=0.2)
_MERGE_PATCH = "application/merge-patch+json"
_CONNECTIONS = 128
_MAX_REFUSAL = 1000


class ApiError(CommandError):
    """The API server refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NoAnswer(CommandError):  # noqa: N818 - what happened, which a watch gets over
    """The API server was not reached, or fell silent."""


@dataclass(frozen=True)
class Bounds:
    """What is read at most."""

    page: int = PAGE
    """Objects that are asked for at once."""
    answer: int = MAX_BODY_BYTES
    list: float = math.inf
    """The pages of a collection together."""


class Api:
    """An API server. All methods raise CommandError with a sentence for people; `what` is its begin."""

    def __init__(self, access: Access, bounds: Bounds | None = None) -> None:
        self._access, self._bounds = access, bounds or Bounds()
        self.server = access.server
        self.date = ""
        """The API server's clock, as its last answer had it in the header `Date`."""
        self._certificate: ClientCertificate | None = None
        self._pool: urllib3.PoolManager | None = None

    def get(self, path: str, query: Query | None = None, *, what: str) -> Raw:
        """Return an object, or an answer that is one."""
        return _decoded(self._ask("GET", path, query, what=what), what)

    def create(self, path: str, body: Raw, *, what: str) -> Raw:
        """Create an object in a collection and return it as stored."""
        return _decoded(self._ask("POST", path, STRICT, body=body, what=what), what)

    def patch(self, path: str, body: Raw, *, what: str) -> Raw:
        """Lay `body` over an object (RFC 7386) and return the whole."""
        return _decoded(self._ask("PATCH", path, STRICT, body=body, content=_MERGE_PATCH, what=what), what)

    def delete(self, path: str, body: Raw | None = None, *, what: str) -> None:
        """Delete an object."""
        _decoded(self._ask("DELETE", path, None, body=body, what=what), what)

    def through(self, path: str, headers: Mapping[str, str], *, most: int, what: str) -> bytes:
        """Return what a pod answers through the API server's proxy: `most` bytes, or it is refused."""
        response = self._send("GET", path, None, what=what, further=headers, through=True)
        return self._read(response, most, what)

    def items(self, path: str, query: Query | None = None, *, most: int | None = None, what: str) -> list[Raw]:
        """Return the objects of a collection, page by page; at most so many, the first of them."""
        found, more, size = [], "", 0
        while True:
            asked = {"limit": self._bounds.page, **(query or {}), **({"continue": more} if more else {})}
            payload = self._ask("GET", path, asked, what=what)
            size += len(payload)
            if size > self._bounds.list:
                raise CommandError(f"{what}: the list is larger than {self._bounds.list} bytes")
            page = _decoded(payload, what)
            found += [item for item in page.get("items") or [] if isinstance(item, dict)]
            more = str((page.get("metadata") or {}).get("continue") or "")
            if not more or (most is not None and len(found) >= most):
                return found[:most]

    def watch(self, path: str, query: Query, *, seconds: int, what: str) -> Iterator[Raw]:
        """Yield the events of a watch until it ends, `seconds` at most."""
        given = {**query, "watch": "true", "timeoutSeconds": seconds}
        for line in self.lines(path, given, silence=seconds + 30, what=what):
            event = _decoded(line, what)
            if event.get("type") == "ERROR":
                return
            yield event

    def lines(self, path: str, query: Query, *, silence: float | None = None, what: str) -> Iterator[bytes]:
        """Yield the lines of an answer as they arrive. A longer line than MAX_LINE_BYTES is cut.

        silence: seconds after which a server that sends nothing is given up; None: never.
        """
        response = self._send("GET", path, query, what=what, timeout=urllib3.Timeout(connect=10, read=silence))
        try:
            rest = b""
            for part in response.stream(2**16, decode_content=True):
                *lines, rest = (rest + part).split(b"\n")
                yield from (line[:MAX_LINE_BYTES] for line in lines)
                rest = rest[:MAX_LINE_BYTES]
            if rest:
                yield rest
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoAnswer(f"{what}: the connection to {self.server} broke ({_root(error)})") from error
        finally:
            response.close()

    def _ask(
        self, method: str, path: str, query: Query | None, *, what: str, body: Raw | None = None, content: str = ""
    ) -> bytes:
        response = self._send(method, path, query, what=what, body=body, content=content)
        return self._read(response, self._bounds.answer, what)

    def _read(self, response: urllib3.BaseHTTPResponse, most: int, what: str) -> bytes:
        try:
            payload = response.read(most + 1, decode_content=True)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoAnswer(f"{what}: the connection to {self.server} broke ({_root(error)})") from error
        finally:
            response.release_conn()
        if len(payload) > most:
            raise CommandError(f"{what}: the answer is larger than {most} bytes")
        return payload

    def _send(
        self,
        method: str,
        path: str,
        query: Query | None,
        *,
        what: str,
        body: Raw | None = None,
        content: str = "",
        timeout: urllib3.Timeout = _TIMEOUT,
        further: Mapping[str, str] | None = None,
        through: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """further: headers. through: a pod answers, whose refusals say nothing about the credentials."""
        url = f"{self.server}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        payload = None if body is None else orjson.dumps(body)
        pool, headers = self._pool_and_headers(content or "application/json")
        try:
            response = pool.request(
                method,
                url,
                body=payload,
                headers=headers | dict(further or {}),
                preload_content=False,
                retries=_RETRIES,
                timeout=timeout,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoAnswer(f"{what}: the cluster does not answer ({_root(error)})") from error
        if not through:
            self.date = response.headers.get("Date", self.date)
        if response.status == 401 and not through:
            self._access.credentials.refused()
        if response.status >= 400:
            refusal = response.read(2**16, decode_content=True)
            response.close()
            if through:
                raise CommandError(f"{what}: {_sentence_of_pod(response.status, refusal)}")
            raise ApiError(f"{what}: {_sentence(response.status, response.reason, refusal)}", response.status)
        return response

    def _pool_and_headers(self, content: str) -> tuple[urllib3.PoolManager, dict[str, str]]:
        """Return the pool and headers of the next request. A changed certificate makes new connections."""
        credentials = self._access.credentials
        try:
            token, certificate = credentials.token(), credentials.certificate()
        except (AccessError, OSError) as error:
            raise CommandError(f"no credentials for {self.server}: {error}") from error
        if self._pool is None or certificate != self._certificate:
            self._certificate, self._pool = certificate, _pool(self._access)
        headers = {"Accept": "application/json", "Content-Type": content, "User-Agent": "disttrain"}
        return self._pool, headers | ({"Authorization": f"Bearer {token}"} if token else {})


def _pool(access: Access) -> urllib3.PoolManager:
    options: dict[str, Any] = {"maxsize": _CONNECTIONS, "block": False}
    try:
        context = access.ssl_context()
    except (ssl.SSLError, ValueError, OSError) as error:
        raise CommandError(f"the kubeconfig's certificates for {access.server} cannot be used: {error}") from error
    if context is not None:
        options |= {"ssl_context": context, "server_hostname": access.server_name}
    if access.proxy is None:
        return urllib3.PoolManager(**options)
    user = urllib3.util.parse_url(access.proxy).auth
    headers = urllib3.make_headers(proxy_basic_auth=urllib.parse.unquote(user)) if user else None
    return urllib3.ProxyManager(access.proxy, proxy_headers=headers, proxy_ssl_context=context, **options)


def _decoded(payload: bytes, what: str) -> Raw:
    try:
        answer = orjson.loads(payload)
    except ValueError as error:
        raise CommandError(f"{what}: the answer is not JSON ({error}); is this an API server?") from error
    if not isinstance(answer, dict):
        raise CommandError(f"{what}: the answer is not an object; is this an API server?")
    return answer


def _sentence(status: int, reason: str | None, refusal: bytes) -> str:
    """Return the message of the API server, without its wrapping."""
    if status == 401:
        return "the cluster does not accept these credentials (401): log in again, or name another --context"
    try:
        return str(orjson.loads(refusal)["message"])
    except (ValueError, TypeError, KeyError):
        pass
    if status == 404:
        # A path that the API server does not know is answered in plain text, a missing object in JSON.
        return "the cluster does not know DistTrainingJobs; install the chart first"
    return f"{status} {reason or refusal[:200].decode(errors='replace')}"


def _sentence_of_pod(status: int, refusal: bytes) -> str:
    """Return what a pod, or the API server in its place, says instead of an answer."""
    try:
        answer = orjson.loads(refusal)
        return str(answer.get("message") or answer["error"])[:_MAX_REFUSAL]
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{status} {refusal[:200].decode(errors='replace').strip()}"


def _root(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error) or type(error).__name__
