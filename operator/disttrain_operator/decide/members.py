"""Members of a gang <-> the short text by which a status names them: "worker 0-3,7 ps 1"."""

import re
from collections.abc import Iterable, Mapping

from disttrain_api.names import Role

Identity = tuple[Role, int]

_OF_ROLE = re.compile(f"({'|'.join(Role)}) ([0-9,-]+)")
_RANGE = re.compile("([0-9]{1,9})(?:-([0-9]{1,9}))?")


def members_as_text(members: Iterable[Identity]) -> str | None:
    """Return the members as ranges of indices, role by role; None: there are none."""
    known = set(members)
    texts = (f"{role} {_ranges(sorted(index for of, index in known if of is role))}" for role in Role)
    return " ".join(text for text in texts if not text.endswith(" ")) or None


def members_of_text(text: str | None, replicas: Mapping[Role, int]) -> frozenset[Identity]:
    """Return the members that a text names. What it holds besides is ignored. replicas: how many a role has."""
    found: set[Identity] = set()
    begins = dict.fromkeys(Role, 0)
    for name, ranges in _OF_ROLE.findall(text or ""):
        role = Role(name)
        for match in filter(None, map(_RANGE.fullmatch, ranges.split(","))):
            # The ranges ascend: so no text has more read from it than there are members.
            first, last = max(begins[role], int(match[1])), min(int(match[2] or match[1]), replicas[role] - 1)
            found.update((role, index) for index in range(first, last + 1))
            begins[role] = max(begins[role], last + 1) if first <= last else begins[role]
    return frozenset(found)


def _ranges(indices: list[int]) -> str:
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
