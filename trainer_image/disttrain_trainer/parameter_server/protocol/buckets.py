"""Size of one message of a push or a pull that is split so that it overlaps with computation."""

from collections.abc import Sequence

BUCKET_BYTES = 4 * 2**20
"""Large enough for the network's full rate, small enough for several per pass over the model."""

_MOST = 64
"""Messages per pull: few beside those that a socket holds back for a worker before it drops any."""


def buckets(sizes: Sequence[int]) -> list[range]:
    """Cuts a list into stretches of at least a bucket each, but for the last. `sizes`: bytes of its entries.

    At least one, which is empty where the list is.
    """
    limit = max(BUCKET_BYTES, sum(sizes) // _MOST)
    found, start, held = [], 0, 0
    for index, size in enumerate(sizes):
        held += size
        if held >= limit:
            found.append(range(start, index + 1))
            start, held = index + 1, 0
    return [*found, range(start, len(sizes))] if start < len(sizes) or not found else found
