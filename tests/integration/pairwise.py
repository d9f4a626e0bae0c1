"""Few combinations that hold every pair of values: most faults need no more than two settings to meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
_Choice = tuple[str, int]
"""A setting, and which of its values."""


def pairwise(choices: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Return rows with a value for each setting, which together hold every pair of values that is allowed.

    `allowed` judges rows, and parts of rows. Greedy: each row begins with a pair that no row holds yet, and each other
    setting takes the value that brings the most such pairs.
    """
    wanted = {
        pair
        for one, other in combinations(choices, 2)
        for pair in _pairs(one, other, choices)
        if allowed(_row(pair, choices))
    }
    rows = list[Row]()
    while wanted:
        row = list(min(wanted))
        for setting in choices:
            if setting not in dict(row):
                row.append(_best(setting, row, choices, wanted, allowed))
        wanted -= {_pair(one, other) for one, other in combinations(row, 2)}
        rows.append(_row(row, choices))
    return rows


def _best(
    setting: str,
    row: list[_Choice],
    choices: Mapping[str, Sequence[Any]],
    wanted: set[tuple[_Choice, _Choice]],
    allowed: Callable[[Row], bool],
) -> _Choice:
    options = [(setting, number) for number in range(len(choices[setting]))]
    possible = [option for option in options if allowed(_row([*row, option], choices))]
    return max(possible, key=lambda option: sum(_pair(option, other) in wanted for other in row))


def _pairs(one: str, other: str, choices: Mapping[str, Sequence[Any]]) -> list[tuple[_Choice, _Choice]]:
    return [_pair((one, a), (other, b)) for a in range(len(choices[one])) for b in range(len(choices[other]))]


def _pair(one: _Choice, other: _Choice) -> tuple[_Choice, _Choice]:
    return (one, other) if one < other else (other, one)


def _row(row: Sequence[_Choice], choices: Mapping[str, Sequence[Any]]) -> Row:
    return {setting: choices[setting][number] for setting, number in row}
