"""Ranks in a sentence."""

_MOST_RANKS = 8


def ranks_in_words(ranks: list[int]) -> str:
    """Return the ranks as the subject of a sentence, eight of them at most."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:_MOST_RANKS]]
    more = len(ranks) - len(shown)
    last = f"{more} more" if more else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"
