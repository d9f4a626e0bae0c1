"""Errors of this package.

DisttrainError
├── LayoutError      degrees, world size or batch sizes that do not fit each other
└── ManifestError    a manifest that cannot be read, or is wrong: holds every problem found
"""


class DisttrainError(Exception):
    """Base of all errors whose message is meant for the user as it stands."""


class LayoutError(DisttrainError):
    """Numbers that do not fit each other; the message holds them."""
