"""Which object a watch event of much text is about, without parsing it: its metadata are stepped through one by one.

Labels and owners come before uid and name, and there may be a hundred thousand: a value of plain values is one match
of an expression. What nests deeper is stepped over bracket by bracket, of which only so many are looked at. Nothing
within a value is ever taken for the object's own name.
"""

import re

import orjson

from disttrain_operator.kube.tolerant import Unreadable, identity_of

MAX_BRACKETS = 50_000
"""Some 10 ms of work."""

_STRING = r'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rf"(?:{_STRING}|[-+.\w]++)"
_FLAT = rf"\{{\s*+(?:{_STRING}\s*+:\s*+{_PLAIN}\s*+,?+\s*+)*+\}}"
_SIMPLE = rf"(?:{_PLAIN}|{_FLAT}|\[\s*+(?:(?:{_PLAIN}|{_FLAT})\s*+,?+\s*+)*+\])"


def _compiled(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode(), re.DOTALL)


_BEGIN = _compiled(
    r'\s*+\{\s*+"type"\s*+:\s*+"(ADDED|MODIFIED|DELETED)"\s*+,\s*+"object"\s*+:\s*+\{\s*+'
    r'(?:"(?:kind|apiVersion)"\s*+:\s*+"[^"\\]*+"\s*+,\s*+)*+"metadata"\s*+:\s*+\{'
)
_KEY = _compiled(rf"\s*+({_STRING})\s*+:\s*+")
_VALUE = _compiled(_SIMPLE)
_BRACKET = _compiled(rf'(?:[^"\[\]{{}}]++|{_STRING})*+([\[\]{{}}])')
_BETWEEN = _compiled(r"\s*+,")
_OWN = (b'"name"', b'"namespace"', b'"uid"', b'"resourceVersion"')


def event_identity(line: bytes, why: str) -> tuple[str, Unreadable | None] | None:
    """Return the type of an event and the object that it is about; None where it is about none.

    The object is None where its metadata do not say within bounds which it is.
    """
    found = _BEGIN.match(line)
    if found is None:
        return None
    metadata, place, brackets = dict[str, str](), found.end(), MAX_BRACKETS
    while len(metadata) < len(_OWN) and (key := _KEY.match(line, place)) is not None:
        value = _VALUE.match(line, key.end())
        if value is not None:
            place = value.end()
            if key[1] in _OWN and value[0][:1] == b'"':
                metadata[orjson.loads(key[1])] = _text(value[0])
        else:
            place, brackets = _behind(line, key.end(), brackets)
        comma = _BETWEEN.match(line, place)
        if comma is None:
            break
        place = comma.end()
    return found[1].decode(), identity_of({"metadata": metadata}, why)


def _behind(line: bytes, place: int, brackets: int) -> tuple[int, int]:
    """Return where a value ends that nests, and how many brackets may be looked at after it."""
    depth = 0
    for left in range(brackets, 0, -1):
        found = _BRACKET.match(line, place)
        if found is None:
            break
        place = found.end()
        depth += 1 if found[1] in (b"{", b"[") else -1
        if depth <= 0:
            return place, left
    return len(line), 0


def _text(value: bytes) -> str:
    try:
        return str(orjson.loads(value))
    except orjson.JSONDecodeError:
        return ""
