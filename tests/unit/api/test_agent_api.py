"""The description of the agent's API; its real answers are compared with it in tests/unit/agent/test_http_api.py."""

from typing import Any

import pytest

from disttrain_api.agent_api import OPERATIONS, REFUSALS, codes, document
from disttrain_api.names import LEADER_PATH, TOKEN_HEADER
from tests.described_answer import assert_described

DOCUMENT = document()


def nodes(inside: Any) -> list[dict[str, Any]]:
    """Every object of a document."""
    inner = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, list) else ()
    return ([inside] if isinstance(inside, dict) else []) + [node for one in inner for node in nodes(one)]


def test_each_operation_has_its_path_its_method_and_its_codes() -> None:
    described = {
        (path, method.upper()): [int(code) for code in operation["responses"]]
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    }
    assert described == {(one.path, one.method): codes(one) for one in OPERATIONS}
    assert {code for one in OPERATIONS for code in codes(one)} == {200, *REFUSALS}


def test_every_reference_leads_somewhere_and_every_schema_is_led_to() -> None:
    wanted = {node["$ref"] for node in nodes(DOCUMENT) if "$ref" in node}
    parts = DOCUMENT["components"]
    assert wanted == {f"#/components/{part}/{name}" for part in ("responses", "schemas") for name in parts[part]}


def test_the_token_is_asked_for_everywhere_but_where_the_agent_asks_for_none_or_takes_a_proof() -> None:
    (scheme,) = DOCUMENT["components"]["securitySchemes"].items()
    assert scheme == ("token", {"type": "apiKey", "in": "header", "name": TOKEN_HEADER})
    assert DOCUMENT["security"] == [{"token": []}]
    operations = [(path, one) for path, methods in DOCUMENT["paths"].items() for one in methods.values()]
    assert {path: one["security"] for path, one in operations if "security" in one} == {
        "/healthz": [],
        LEADER_PATH: [{"token": []}, {}],
    }


RANK = {"rank": 0, "report": {"rank": 0, "step": 1, "loss": 0.5, "checkpoint": {"step": 1, "path": "/", "time": "t"}}}
STATUS = {"jobUid": "u", "attempt": 1, "ranks": [RANK]}


@pytest.mark.parametrize(
    ("path", "code", "answer", "complaint"),
    [
        ("/v1/status", 200, STATUS, None),
        ("/v1/status", 409, {"error": "no"}, "only 200, 401, 405, 413, 429, 503 are described"),
        ("/v1/none", 200, STATUS, "is answered 200"),
        ("/v1/none", 404, {"error": "no"}, None),
        ("/v1/logs?rank=1", 404, {"error": 4}, "4 is no string"),
        ("/v1/status", 200, {"jobUid": "u"}, "answer.attempt is absent"),
        ("/v1/status", 200, STATUS | {"another": 1}, "answer.another is not described"),
        ("/v1/status", 200, STATUS | {"attempt": -1}, "minimum is 0"),
        ("/v1/status", 200, STATUS | {"attempt": True}, "True is no integer"),
        ("/v1/status", 200, STATUS | {"ranks": [{"rank": 0, "report": {"loss": 1}}]}, "report.rank is absent"),
        ("/v1/status", 200, STATUS | {"ranks": [{"rank": 0, "pid": None}]}, "None is no integer"),
        ("/v1/stacks", 200, {"stacks": {"0": 1}}, "answer.stacks.0: 1 is no string"),
        ("/healthz", 200, {"ok": False}, "const is True"),
    ],
)
def test_what_the_document_does_not_describe_is_noticed(
    path: str, code: int, answer: Any, complaint: str | None
) -> None:
    if complaint is None:
        assert_described(path, "GET", code, answer)
        return
    with pytest.raises(AssertionError, match=complaint):
        assert_described(path, "GET", code, answer)
