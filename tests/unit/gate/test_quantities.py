"""Numbers that others write are read in bounded memory, whatever stands in them; and none is lost by that."""

import sys
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.pod_template import _reduce, trainer_schema
from disttrain_api.structural import check
from disttrain_operator.gate.fit import NodeFacts, Requirement, Term, matches
from disttrain_operator.gate.quantities import MAX_AMOUNT, MAX_DIGITS, amount, amounts, whole_number
from disttrain_operator.gate.read import cluster_pod, effective_requests, node_facts

SUFFIXES: dict[str, Fraction] = {
    "": Fraction(1),
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("num_kMGTPE", -3) if suffix != "_"},
    **{f"{suffix}i": Fraction(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
DIGITS = st.text("0123456789", max_size=30) | st.integers(1, 5000).flatmap(
    lambda count: st.sampled_from(["0" * count, "9" * count, "1" + "0" * count, "0" * count + "1"])
)
FAR = st.integers(-(10**400), 10**400) | st.integers(-5000, 5000) | st.integers(-30, 30)
EXPONENTS = st.tuples(st.sampled_from(["e", "E"]), st.sampled_from(["", "+", "0", "+000"]), FAR)


def spelled(exponent: tuple[str, str, int]) -> str:
    letter, before, value = exponent
    return f"{letter}{'' if value < 0 else before}{value}"


@st.composite
def quantities(draw: st.DrawFn, ends: st.SearchStrategy[str]) -> str:
    whole, part = draw(DIGITS), draw(st.none() | DIGITS)
    if not whole and not part:
        whole = "0"
    return draw(st.sampled_from(["", "+", "-"])) + whole + ("" if part is None else f".{part}") + draw(ends)


def a_pod(requests: dict[str, str]) -> dict[str, Any]:
    """A pod that runs on node `a`."""
    containers = [{"name": "c", "image": "i", "resources": {"requests": requests}}]
    return {"metadata": {"uid": "u", "namespace": "evil"}, "spec": {"nodeName": "a", "containers": containers}}


@given(quantities(st.sampled_from(list(SUFFIXES)) | EXPONENTS.map(spelled)), st.sampled_from(["cpu", "memory"]))
def test_any_quantity_with_any_exponent_is_read_and_is_bounded(text: str, resource: str) -> None:
    """Red where the result is not capped."""
    assert -MAX_AMOUNT <= amount(resource, text) <= MAX_AMOUNT


def exactly(number: str, factor: Fraction) -> int:
    """The number that is meant, rounded away from zero, where it can be reckoned at once."""
    whole, _, part = number.lstrip("+-").partition(".")
    exact = Fraction(int(f"0{whole}{part}"), 10 ** len(part)) * factor
    return (-1 if number.startswith("-") else 1) * min(-(-exact.numerator // exact.denominator), MAX_AMOUNT)


SHORT = st.from_regex(r"\A[+-]?([0-9]{1,25}(\.[0-9]{0,25})?|\.[0-9]{1,25})\Z")


@given(SHORT, st.sampled_from(list(SUFFIXES.items())))
def test_what_is_short_is_read_exactly(number: str, suffix: tuple[str, Fraction]) -> None:
    spelling, factor = suffix
    assert amount("memory", number + spelling) == exactly(number, factor)
    assert amount("cpu", number + spelling) == exactly(number, factor * 1000)


@given(SHORT, st.integers(-60, 60))
def test_an_exponent_is_read_exactly(number: str, exponent: int) -> None:
    assert amount("memory", f"{number}e{exponent}") == exactly(number, Fraction(10) ** exponent)


def test_more_digits_than_are_read_round_up_as_kubernetes_does() -> None:
    assert amount("memory", "0." + "0" * MAX_DIGITS + "1") == 1
    assert amount("memory", "2." + "0" * MAX_DIGITS + "1") == 3
    assert amount("memory", "2." + "0" * 10 * MAX_DIGITS) == 2
    assert amount("memory", "0" * 10_000 + "7") == 7
    assert amount("memory", "0." + "0" * 10_000 + "7e10001") == 7


@pytest.mark.parametrize("resource", ["cpu", "memory", "nvidia.com/gpu"])
@pytest.mark.parametrize("text", ["1e10000000", "1e1000000", "9" * 100_000, "1e" + "9" * 5_000, "9223372036854775808"])
def test_what_kubernetes_cannot_count_counts_as_the_most_it_can(resource: str, text: str) -> None:
    assert amount(resource, text) == MAX_AMOUNT == 2**63 - 1
    assert amount(resource, f"-{text}") == -MAX_AMOUNT


@pytest.mark.parametrize("text", ["1e1000000", "1e-1000000", "0.1e1000000", "1e-1000000000", "9" * 4_000])
def test_nothing_is_computed_of_an_exponent_that_is_too_great(text: str) -> None:
    """Red where a power of ten is computed before its size is looked at, of great and of small exponents."""
    amount("cpu", text)
    tracemalloc.start()
    amount("cpu", text)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 30_000


def test_what_is_next_to_nothing_counts_as_the_least() -> None:
    for text in ("1e-10000000", "0.1e-" + "9" * 5_000, "1n", "." + "0" * 100_000 + "1"):
        assert amount("memory", text) == 1
    assert amount("memory", "0e10000000") == amount("memory", "0" * 100_000) == 0


def test_a_pod_of_huge_quantities_is_read_and_fills_its_node() -> None:
    facts = cluster_pod(a_pod({"cpu": "1e10000000"}))
    assert (facts.problem, dict(facts.requests)) == ("", {"cpu": MAX_AMOUNT, "pods": 1})
    # 12 kB, which once took 28 seconds of everybody's loop.
    facts = cluster_pod(a_pod({f"x.io/r{number:03}": "1e1000000" for number in range(100)}))
    assert {value for name, value in facts.requests if name != "pods"} == {MAX_AMOUNT}


def test_a_node_of_huge_quantities_is_read() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    facts = node_facts(
        {"metadata": {"name": "a"}, "status": {"allocatable": {"cpu": "1e9999999"}, "conditions": ready}}
    )
    assert (facts.ready, facts.allocatable) == (True, {"cpu": MAX_AMOUNT})


@pytest.mark.parametrize(
    "odd",
    ["", ".", "+", "e3", "1e", "1e1.5", "1_000", "1/2", "1 Gi", "0x10", "nan", "inf", "५", "1²", None, True, [1], {}],
)
def test_what_is_no_quantity_is_reported_with_its_field(odd: object) -> None:
    with pytest.raises(ValueError, match=r"^`cpu` is .*, expected a quantity such as '500m', '2' or '16Gi'$"):
        amounts({"cpu": odd})


def test_a_long_text_that_is_no_quantity_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="expected a quantity") as raised:
        amount("cpu", "x" * 1_000_000)
    assert len(str(raised.value)) < 300


QUANTITY = trainer_schema()["resources"]["properties"]["requests"]["additionalProperties"]["pattern"]


def test_the_schema_of_the_next_cluster_is_as_strict() -> None:
    """`make generate-pod-template` takes it from a cluster, whose own pattern is wider."""
    assert (
        _reduce({"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.api.resource.Quantity"}, {})["pattern"]
        == QUANTITY
    )


@given(st.from_regex(QUANTITY))
def test_what_a_job_may_ask_for_in_its_template_can_be_read(text: str) -> None:
    # In an expression `$` also stands before a last line break, for Python alone.
    assert abs(amount("memory", text.removesuffix("\n"))) <= MAX_AMOUNT


@pytest.mark.parametrize("text", ["1e10000000", "1e1.5", "1e-100", "1" * 100])
def test_a_template_that_asks_for_the_impossible_is_refused_at_its_field(text: str) -> None:
    schema = trainer_schema()["resources"]
    (violation,) = check({"requests": {"cpu": text}}, schema, ("resources",))
    assert violation.location == ("resources", "requests", "cpu")
    assert "is not a quantity such as '500m', '2' or '16Gi'" in violation.message


@given(st.text("0123456789+-_ e.²५", max_size=30) | FAR.map(str) | FAR)
def test_whole_numbers_are_those_of_64_bits(value: str | int) -> None:
    found = whole_number(value)
    try:
        exact = int(value) if str(value).lstrip("+-").isascii() else None
    except ValueError:
        exact = None
    plain = str(value)[1:] if str(value)[:1] in ("+", "-") else str(value)
    expected = exact if exact is not None and plain.isdigit() and -(2**63) <= exact < 2**63 else None
    assert found == expected


def test_whole_numbers_of_any_length() -> None:
    assert whole_number("0" * 100_000 + "7") == 7
    assert [whole_number(odd) for odd in ("9" * 100_000, "", None, True, 1.5, [1], {})] == [None] * 7


def test_a_node_selector_compares_numbers_of_64_bits_only() -> None:
    node = NodeFacts("a", {}, {"size": "7", "huge": "9" * 50})

    def holds(key: str, operator: str, value: Any) -> bool:
        return matches(Term(labels=(Requirement(key, operator, (value,)),)), node)

    assert holds("size", "Gt", "6")
    assert holds("size", "Lt", "+8")
    for key, value in (("size", "9" * 50), ("size", "1_0"), ("size", "५"), ("huge", "1"), ("size", None)):
        assert not holds(key, "Gt", value)
        assert not holds(key, "Lt", value)


def test_labels_that_are_no_numbers_of_64_bits_say_nothing() -> None:
    raw = a_pod({})
    for text in ("²", "9" * 60, "-1", "1_0"):
        raw["metadata"]["labels"] = {"disttrain.io/index": text, "disttrain.io/topology-group": text}
        facts = cluster_pod(raw)
        assert (facts.problem, facts.identity, facts.group) == ("", ("", 0), None)


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python `work` runs."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_containers_cost_in_proportion_to_their_number() -> None:
    """A pod of a megabyte has thousands of them, each with a resource of its own."""

    def lines_of(count: int) -> int:
        containers = [
            {"restartPolicy": "Always" if number % 2 else None, "resources": {"requests": {f"x.io/{number}": "1"}}}
            for number in range(count)
        ]
        return lines_run(lambda: effective_requests({"initContainers": containers, "containers": containers}))

    assert lines_of(400) <= 4.4 * lines_of(100)
