"""Numbers that others write: quantities of Kubernetes as whole numbers, rounded up as its scheduler does (cpu in
thousandths, the rest in ones), and whole numbers in labels and selectors.

The API server takes `1e10000000`, and anybody may ask for that much: digits and exponents are bounded before anything
is computed of them. Kubernetes caps what is more than it can count, and rounds up what is more precise than it can say;
so do we. Not to read it would be worse: a pod of such a quantity would count as one that takes nothing of its node.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from disttrain_api.bounds import cut

Amounts = Mapping[str, int]
"""Resource -> amount."""

MAX_AMOUNT = 2**63 - 1
"""The greatest number of Kubernetes; what is greater counts as this."""
MAX_DIGITS = 64
"""Digits of a quantity that are reckoned with; any after them round up."""

# Ten to the power of the first is more than MAX_AMOUNT, of the second less than one, even times 2**60.
_TOO_MUCH, _NEXT_TO_NOTHING = 19, -22
# An exponent of so many digits is more than a text has digits to make up for.
_EXPONENT_DIGITS, _FAR = 9, 10**9
_WHOLE_DIGITS = 19
_MAX_SHOWN = 60

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
"""Suffix -> power of ten."""
_THOUSANDTHS = "cpu"

_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<direction>[+-]?)(?P<exponent>[0-9]+))?"
)
_WHOLE = re.compile(r"(?P<sign>[+-]?)(?P<digits>[0-9]+)")


def amount(resource: str, quantity: object) -> int:
    """The amount of a resource that a quantity means, MAX_AMOUNT at most. Raises ValueError where it is none."""
    match = _QUANTITY.fullmatch(_text(quantity))
    whole, part = ("", "") if match is None else (match["whole"], match["part"] or "")
    if match is None or not whole + part:
        found = f"'{cut(quantity, _MAX_SHOWN)}'" if isinstance(quantity, str) else f"of type {type(quantity).__name__}"
        name = cut(resource, _MAX_SHOWN)
        raise ValueError(f"`{name}` is {found}, expected a quantity such as '500m', '2' or '16Gi'")
    power = _power(match) - len(part) + (3 if resource == _THOUSANDTHS else 0)
    size = _rounded_up((whole + part).lstrip("0"), power, _BINARY.get(match["suffix"] or "", 1))
    return -size if match["sign"] == "-" else size


def amounts(quantities: Mapping[str, object] | None) -> dict[str, int]:
    """The amounts of a resource list."""
    return {resource: amount(resource, quantity) for resource, quantity in (quantities or {}).items()}


def whole_number(value: object) -> int | None:
    """The number of 64 bits that a label or a selector holds, as the API server reads it; None where it holds none."""
    match = _WHOLE.fullmatch(value if isinstance(value, str) else _text(value))
    digits = "" if match is None else match["digits"].lstrip("0") or "0"
    if match is None or len(digits) > _WHOLE_DIGITS:
        return None
    number = int(match["sign"] + digits)
    return number if -MAX_AMOUNT - 1 <= number <= MAX_AMOUNT else None


def add_to(total: dict[str, int], more: Amounts) -> None:
    """Make `total` greater, resource by resource."""
    for resource, value in more.items():
        total[resource] = total.get(resource, 0) + value


def raise_to(highest: dict[str, int], others: Amounts) -> None:
    """Make `highest` hold the greater of both, resource by resource."""
    for resource, value in others.items():
        highest[resource] = max(highest.get(resource, value), value)


def spell(resource: str, value: int) -> str:
    """A quantity for people: 500m, 4, 16Gi."""
    if resource == _THOUSANDTHS:
        return f"{value}m" if value % 1000 else str(value // 1000)
    for suffix, factor in reversed(_BINARY.items()):
        if value and value % factor == 0:
            return f"{value // factor}{suffix}"
    return str(value)


def _text(value: object) -> str:
    """Return the number as in JSON."""
    if isinstance(value, str):
        return value.strip()
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _power(match: re.Match[str]) -> int:
    """The power of ten that a suffix or an exponent means."""
    if match["exponent"] is None:
        return _POWERS.get(match["suffix"] or "", 0)
    digits = match["exponent"].lstrip("0")
    power = int(digits or "0") if len(digits) <= _EXPONENT_DIGITS else _FAR
    return -power if match["direction"] == "-" else power


def _rounded_up(digits: str, power: int, factor: int) -> int:
    """digits x 10**power x factor, where the first digit is no 0."""
    if not digits:
        return 0
    highest = len(digits) - 1 + power
    if highest >= _TOO_MUCH:
        return MAX_AMOUNT
    if highest < _NEXT_TO_NOTHING:
        return 1
    number, power = int(digits[:MAX_DIGITS]), power + max(0, len(digits) - MAX_DIGITS)
    if digits[MAX_DIGITS:].strip("0"):
        number += 1
    exact = Fraction(number * factor) * Fraction(10) ** power
    return min(-(-exact.numerator // exact.denominator), MAX_AMOUNT)
