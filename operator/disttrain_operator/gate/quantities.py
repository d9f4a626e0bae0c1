"""Quantities of Kubernetes as whole numbers, rounded up as its scheduler does: cpu in thousandths, the rest in ones."""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

Amounts = Mapping[str, int]
"""Resource -> amount."""

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
}
_THOUSANDTHS = "cpu"


def amount(resource: str, quantity: object) -> int:
    """The amount of a resource that a quantity means. Raises ValueError where it is none."""
    value = _value(str(quantity).strip())
    if resource == _THOUSANDTHS:
        value *= 1000
    return -(-value.numerator // value.denominator)


def amounts(quantities: Mapping[str, object] | None) -> dict[str, int]:
    """The amounts of a resource list."""
    return {resource: amount(resource, quantity) for resource, quantity in (quantities or {}).items()}


def add(*parts: Amounts) -> dict[str, int]:
    """The sum, resource by resource."""
    return _combine(parts, lambda one, other: one + other)


def largest(*parts: Amounts) -> dict[str, int]:
    """The greatest of each resource."""
    return _combine(parts, max)


def spell(resource: str, value: int) -> str:
    """A quantity for people: 500m, 4, 16Gi."""
    if resource == _THOUSANDTHS:
        return f"{value}m" if value % 1000 else str(value // 1000)
    for suffix, factor in reversed(_BINARY.items()):
        if value and value % factor == 0:
            return f"{value // factor}{suffix}"
    return str(value)


def _combine(parts: Iterable[Amounts], both: Callable[[int, int], int]) -> dict[str, int]:
    result: dict[str, int] = {}
    for part in parts:
        for resource, value in part.items():
            result[resource] = both(result[resource], value) if resource in result else value
    return result


def _value(text: str) -> Fraction:
    for suffix, factor in _BINARY.items():
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * factor
    for suffix, part in _DECIMAL.items():
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * part
    return Fraction(text)  # also with an exponent: 12e6
