"""A rule: one sentence, and two checks that decide whether it applies.

The API server evaluates `cel` at admission, `disttrain validate` and the operator call `check`; both fill the same
sentence with the same numbers. tests/integration/test_crd.py holds the two against each other, rule by rule.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from disttrain_api.spec import JobSpec

Values = Mapping[str, int | str]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_LONG = 60
"""Characters."""


def given(path: str, otherwise: str) -> str:
    """Return a CEL expression: the value at `path`, or `otherwise` where it is absent. Names after `?` may be absent.

    Every access to a field costs the API server as much as its object has fields, at each write of a job, also of its
    status: `has(self.a.b) ? self.a.b : 1` takes four of them where `self.a.?b.orValue(1)` takes two. For the same
    reason rules begin with what is cheap and ends most of them, and stand as deep as what they read. For numbers, words
    and truth values: of what may be long the API server takes an optional value for endless when it estimates a cost.
    """
    return f"{path}.orValue({otherwise})"


def when(wrong: bool, **values: int | str) -> Values | None:
    """Result of a check: the values of its sentence if the rule is broken, else None."""
    return values if wrong else None


@dataclass(frozen=True)
class Rule:
    """One rule about a spec."""

    id: str
    """For tests and reports."""
    path: str
    """The field that it is reported at, for example `spec.parallelism`."""
    sentence: str
    """What is wrong and what to do; `{name}` stands for a word or a number."""
    check: Callable[[JobSpec], Values | None]
    """The values of the sentence where the spec breaks the rule, else None."""
    cel: str
    """The CEL expression that is true where the rule holds; `self` is the object at `scope`."""
    scope: str = "spec"
    """Path of the object that the CEL expression looks at; `path` lies at or below it."""
    values: Mapping[str, str] = field(default_factory=dict)
    """A CEL expression for each name in the sentence."""
    reads: tuple[str, ...] = ()
    """The fields whose values it looks at, where that is not `path`: while one is wrong, the rule is not asked."""
    hint: Callable[[JobSpec], str | None] = lambda spec: None
    """What to do in this very spec, which Python adds to the sentence of a broken rule."""

    def problem(self, spec: JobSpec) -> str | None:
        """The sentence where `spec` breaks the rule, else None."""
        values = self.check(spec)
        return None if values is None else self.sentence.format(**values)

    def validation(self) -> dict[str, str]:
        """The entry under `x-kubernetes-validations` of the object at `scope`."""
        return validation(self.cel, self.sentence, self.values, self.path.removeprefix(self.scope))


def validation(cel: str, sentence: str, values: Mapping[str, str], field_path: str) -> dict[str, str]:
    """An entry under `x-kubernetes-validations`."""
    # With the other reasons the answer begins with `Invalid value: "object"`.
    entry = {"rule": cel, "reason": "FieldValueForbidden"}
    names = _PLACEHOLDER.findall(sentence)
    if names:
        # `'…' + string(n)` is refused for its estimated cost; format is not.
        text = _PLACEHOLDER.sub("%s", sentence).replace("'", "\\'")
        entry["messageExpression"] = _each_value_once(text, [values[name] for name in names])
    else:
        entry["message"] = sentence
    if field_path:
        entry["fieldPath"] = field_path
    return entry


def _each_value_once(text: str, values: list[str]) -> str:
    """Return the expression that puts the values into the text; long ones that stand in others, too, stand in it once.

    The definition of jobs is as large as kubectl can apply.
    """
    repeated = [value for value in values if len(value) > _LONG and sum(other.count(value) for other in values) > 1]
    names = {value: f"v{number}" for number, value in enumerate(dict.fromkeys(repeated))}
    for long, name in names.items():
        values = [value.replace(long, name) for value in values]
    expression = f"'{text}'.format([{', '.join(values)}])"
    for long, name in names.items():
        expression = f"[{long}].map({name}, {expression})[0]"
    return expression
