"""Errors of this package.

DisttrainError
├── LayoutError      degrees, world size or batch sizes that do not fit each other
└── ManifestError    a manifest that cannot be read, or is wrong: holds every problem found
"""

from collections.abc import Sequence

from disttrain_api.bounds import MAX_LISTED
from disttrain_api.violation import Violation


class DisttrainError(Exception):
    """Base of all errors whose message is meant for the user as it stands."""


class LayoutError(DisttrainError):
    """Numbers that do not fit each other; the message holds them."""


class ManifestError(DisttrainError):
    """A manifest that cannot be read, or is wrong. The message lists the first problems, one in a line."""

    def __init__(self, source: str, problems: Sequence[Violation]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = [
            f"{source}:{problem.line}: {problem}" if problem.line else f"{source}: {problem}" for problem in problems
        ]
        if len(lines) > MAX_LISTED:
            lines[MAX_LISTED:] = [f"{source}: and {len(lines) - MAX_LISTED} more problems"]
        super().__init__("\n".join(lines))
