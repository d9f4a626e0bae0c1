"""Whose fault a refusal is: of what was sent, which is refused again, or of the server, which may do better soon."""

import json

import pytest

from disttrain_operator.kube.errors import ApiError, ContentTooLarge, Invalid, ServerTrouble, Unavailable, error_of
from tests.unit.operator.fake_api import status_object

TOO_LARGE = {
    "etcd": (500, "etcdserver: request is too large"),
    "etcd's client": (
        500,
        "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2097279 vs. 2097152)",
    ),
    "etcd's server": (
        500,
        "rpc error: code = ResourceExhausted desc = grpc: received message larger than max (2361035 vs. 2097152)",
    ),
    "the API server": (413, "Request entity too large: limit is 3145728"),
    "a proxy": (413, "<html><h1>413 Request Entity Too Large</h1></html>"),
    "a gateway": (502, "http: request body too large"),
}
TRANSIENT = [
    (500, "etcdserver: request timed out"),
    (500, "etcdserver: leader changed"),
    (500, "etcdserver: too many requests"),
    (500, "etcdserver: mvcc: database space exceeded"),
    (500, 'Internal error occurred: failed calling webhook "x": context deadline exceeded'),
    (503, "the server is currently unable to handle the request"),
    (504, "Timeout: request did not complete within requested timeout"),
]


@pytest.mark.parametrize(("code", "text"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
@pytest.mark.parametrize("as_status", [True, False])
def test_what_is_too_large_is_the_contents_fault_whatever_the_code(code: int, text: str, *, as_status: bool) -> None:
    """Red where code 413, or the words under another code, are an error of another kind."""
    body = json.dumps(status_object(code, "", text)).encode() if as_status else text.encode()
    error = error_of(code, body)
    assert isinstance(error, ContentTooLarge)
    assert isinstance(error, Invalid)
    assert error.code == code
    assert text in error.message


@pytest.mark.parametrize(("code", "text"), TRANSIENT)
def test_what_the_server_lacks_says_nothing_of_the_content(code: int, text: str) -> None:
    assert isinstance(error_of(code, json.dumps(status_object(code, "InternalError", text)).encode()), ServerTrouble)


def test_only_what_is_of_the_content_is_refused_for_good() -> None:
    for code in (400, 413, 422):
        assert isinstance(error_of(code, b"{}"), Invalid)
    for code in (401, 403, 404, 408, 409, 410, 418, 429):
        error = error_of(code, b"{}")
        assert isinstance(error, ApiError)
        assert not isinstance(error, Invalid)
    assert not isinstance(error_of(400, b"{}"), ContentTooLarge | Unavailable)
