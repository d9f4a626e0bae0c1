"""The last collective calls of a rank, by torch's flight recorder: lines below its stacks. Text of a pod: hostile."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

MAX_GROUPS, MAX_CALLS_OF_GROUP = 8, 4
"""Process groups of a rank that are written, and of each the last calls, beside the first that is not done."""
MAX_GROUPS_OF_MAIN = 4
"""Groups of which the first call that is not done and the last one stay where the main thread alone is wanted."""
MAX_BYTES = 16 * 1024
"""What is read of a rank's calls."""
HEADER = "Collective calls, by torch's flight recorder:"
_MAX_NAME, _MAX_SIZES, _MAX_TENSORS, _MAX_DIMENSIONS, _MAX_NUMBER = 48, 64, 3, 6, 2**53
_LINE = re.compile(
    rf"  group ([\w:.-]{{1,{_MAX_NAME}}})(?: \(([\w:.-]{{1,{_MAX_NAME}}})\))?, (call|transfer) ([0-9]{{1,16}}): "
    rf"([\w:.-]{{1,{_MAX_NAME}}})(?: of ([0-9x, ]{{1,{_MAX_SIZES}}}))?, (pending|done)",
    re.ASCII,
)
_ODD = re.compile(r"[^\w:.-]", re.ASCII)

Counted = tuple[str, str, bool]
"""What is counted by itself: the calls or transfers of a group, in each of its backends."""


class Collective(NamedTuple):
    """A call that a rank has begun."""

    group: str
    """Name of its process group: the same on all of its ranks, and of no other group of the job."""
    description: str
    number: int
    """Which call of the group it is, from 1 on; of a transfer, which transfer."""
    name: str
    """Backend and operation."""
    sizes: str
    """Shapes of the first tensors that go in; "" where there are none."""
    pending: bool
    transfer: bool = False
    """Whether it is between two ranks."""

    @property
    def counted(self) -> Counted:
        """With which others it is counted."""
        return self.group, self.name.partition(":")[0], self.transfer

    @property
    def of(self) -> str:
        """Its group, for people."""
        return f"group {self.group} ({self.description})" if self.description else f"group {self.group}"

    @property
    def what(self) -> str:
        """Its number and operation, for people."""
        sizes = f" of {self.sizes}" if self.sizes else ""
        return f"{'transfer' if self.transfer else 'call'} {self.number}: {self.name}{sizes}"


def collectives_in(dump: bytes | str) -> list[Collective]:
    """Return the last calls of each process group in the recorder's JSON, the oldest first; none where it is something
    else."""
    try:
        entries = json.loads(dump).get("entries", [])
    except (ValueError, AttributeError, RecursionError):
        return []
    read = (_of_entry(entry) for entry in entries) if isinstance(entries, list) else ()
    return _last([one for one in read if one is not None], MAX_GROUPS, MAX_CALLS_OF_GROUP)


def lines_of(collectives: Iterable[Collective]) -> str:
    """Return the calls as the text that stands below a rank's stacks; "" where there are none."""
    lines = [f"  {one.of}, {one.what}, {'pending' if one.pending else 'done'}" for one in collectives]
    return "\n".join([HEADER, *lines]) if lines else ""


def collectives_below(text: str) -> list[Collective]:
    """Return the calls in the text of a rank, of as many groups as one has; lines that are none are left out."""
    _, found, rest = text[-MAX_BYTES:].rpartition(HEADER + "\n")
    return _last(list(_read(rest)), MAX_GROUPS, MAX_CALLS_OF_GROUP) if found else []


def shortest(collectives: list[Collective]) -> list[Collective]:
    """Return of each group the first call that is not done, and the last one."""
    return _last(collectives, MAX_GROUPS_OF_MAIN, 1)


def _read(text: str) -> Iterator[Collective]:
    for line in text.split("\n"):
        if found := _LINE.fullmatch(line):
            group, description, kind, number, name, sizes, state = found.groups()
            yield Collective(
                group, description or "", int(number), name, sizes or "", state == "pending", kind == "transfer"
            )


def _last(collectives: list[Collective], groups: int, each: int) -> list[Collective]:
    """The last calls of groups, and the first one of each that is not done. Of many groups those are kept that have
    such a call, and then those that were used last."""
    by_group: dict[Counted, list[int]] = {}
    for at, one in enumerate(collectives):
        # A group that was used again comes last.
        positions = by_group.pop(one.counted, [])
        positions.append(at)
        by_group[one.counted] = positions
    kept: set[int] = set()
    pending_last = sorted(by_group.values(), key=lambda positions: any(collectives[at].pending for at in positions))
    for positions in pending_last[-groups:]:
        pending = [at for at in positions if collectives[at].pending]
        kept.update(positions[-each:], pending[:1])
    return [collectives[at] for at in sorted(kept)]


def _of_entry(entry: Any) -> Collective | None:
    """A call of the recorder's; None where a part of it is missing or odd."""
    try:
        group, description = (str(part) for part in entry["process_group"])
        transfer = entry["is_p2p"] is True
        number = entry["p2p_seq_id" if transfer else "collective_seq_id"]
        name, sizes = str(entry["profiling_name"]), _sizes(entry["input_sizes"])
        done = entry["retired"] is True or entry["state"] == "completed"
    except (LookupError, TypeError, ValueError):
        return None
    if type(number) is not int or not 0 <= number <= _MAX_NUMBER or not group or not name:
        return None
    return Collective(
        _word(group), "" if description == "undefined" else _word(description), number, _word(name), sizes, not done,
        transfer,
    )  # fmt: skip


def _word(text: str) -> str:
    return _ODD.sub("_", text[:_MAX_NAME])


def _sizes(tensors: Any) -> str:
    shown = ", ".join("x".join(str(int(size)) for size in one[:_MAX_DIMENSIONS]) for one in tensors[:_MAX_TENSORS])
    return shown if len(shown) <= _MAX_SIZES else ""
