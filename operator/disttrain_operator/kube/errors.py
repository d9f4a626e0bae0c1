"""Errors of a request to the API server. The type says what to do next, not where it broke.

KubeError
├── AccessError       no usable address or credentials were found: tell the user
├── StandingBy        another replica acts: the request was not sent
├── Unavailable       no answer, or none that counts (refused, reset, timed out, most 5xx): try again later
├── Undecodable       the answer is whole and cannot be read: it nests too deep, or is too large (TooLarge)
└── ApiError          the server understood and refused
    ├── Unauthorized  401: fetch credentials again
    ├── Forbidden     403: RBAC, quota, pod security; `message` says which
    ├── NotFound      404
    ├── Conflict      409: exists already, or is newer than what the writer knew
    ├── Expired       410: this resourceVersion is history, list again
    ├── Invalid       400, 422: will be refused again until the object changes
    │                 413, and 5xx that say so: it is too large (ContentTooLarge)
    └── Throttled     429, longer than the client was willing to wait
"""

# ruff: noqa: N818 - these are Kubernetes' own words

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from disttrain_api.bounds import MAX_MESSAGE_BYTES, cut

_MAX_CAUSES = 100


class KubeError(Exception):
    """Base of everything that a request can end in."""


class AccessError(KubeError):
    """No usable address or credentials; the message is meant for the user as it stands."""


class StandingBy(KubeError):
    """A write that was not sent, as another replica acts by now."""


class Unavailable(KubeError):
    """No answer that counts. Nothing is known of whether the request took effect."""


class Undecodable(KubeError):
    """The server did what it was asked; its answer cannot be read, and would be the same again."""


class TooLarge(Undecodable):
    """The answer has more bytes than the caller takes."""


class ApiError(KubeError):
    """A refusal. `reason`, `message` and `causes` are those of the answer's Status object."""

    def __init__(self, code: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message, self.causes = code, reason, message, causes


class Unauthorized(ApiError):
    """401."""


class Forbidden(ApiError):
    """403."""

    @property
    def is_quota(self) -> bool:
        return "exceeded quota" in self.message

    @property
    def is_for_lack_of_a_right(self) -> bool:
        """RBAC says so; not quota, pod security or an admission webhook."""
        return "cannot create resource" in self.message or "cannot get resource" in self.message

    @property
    def is_new_namespace(self) -> bool:
        """The namespace was made a moment ago, and its controllers have not been there yet."""
        return "service account" in self.message and "not found" in self.message

    @property
    def is_namespace_terminating(self) -> bool:
        return "NamespaceTerminating" in self.causes


class NotFound(ApiError):
    """404."""

    @property
    def is_of_kind(self) -> bool:
        """The server knows no such kind; of an object or a namespace that is missing it would say so."""
        return not self.reason


class Conflict(ApiError):
    """409. `already_exists` tells a taken name from a stale write or a failed precondition."""

    @property
    def already_exists(self) -> bool:
        return self.reason == "AlreadyExists"


class Expired(ApiError):
    """410."""


class Invalid(ApiError):
    """The content is refused, for a value (400, 422) or its size: it would be refused again."""


class ContentTooLarge(Invalid):
    """The content is larger than the API server or etcd accepts."""


class Throttled(ApiError):
    """429."""


_BY_CODE: Mapping[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    413: ContentTooLarge,
    422: Invalid,
    429: Throttled,
}

# What the API server passes on with a code of its own fault: etcd says the first, the library between them the second.
# The others are those of servers and proxies in front of it.
_TOO_LARGE = (
    "request is too large",
    "message larger than max",
    "request entity too large",
    "request body too large",
)


class ServerTrouble(Unavailable):
    """5xx: an answer, but not one about the request. Keeps the words, which may name an admission webhook."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


def error_of(code: int, body: bytes) -> KubeError:
    """The error of an answer with a code of 400 or more."""
    return error_of_status(code, _parse(body), body)


def error_of_status(code: int, status: Mapping[str, Any], body: bytes = b"") -> KubeError:
    """The error that a Status object speaks of, as answer or as an ERROR event of a watch."""
    message = str(status.get("message") or body[:500].decode(errors="replace").strip() or f"HTTP {code}")
    # The API server may repeat in it what it refuses, of any size.
    message = cut(message, MAX_MESSAGE_BYTES)
    kind = _BY_CODE.get(code, ApiError)
    if code >= 500:
        # The code says whose fault it was taken for; only the words say whether the same will be refused again.
        if not any(pattern in message.lower() for pattern in _TOO_LARGE):
            return ServerTrouble(code, message)
        kind = ContentTooLarge
    details = status.get("details")
    causes = tuple(_reasons(details.get("causes"))) if isinstance(details, Mapping) else ()
    return kind(code, str(status.get("reason") or ""), message, causes)


def _reasons(causes: Any) -> Iterator[str]:
    for cause in causes[:_MAX_CAUSES] if isinstance(causes, list) else ():
        if isinstance(cause, Mapping):
            yield str(cause.get("reason", ""))


def _parse(body: bytes) -> Mapping[str, Any]:
    # Proxies and authenticators answer in plain text or HTML.
    try:
        status = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return status if isinstance(status, dict) else {}
