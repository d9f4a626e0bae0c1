"""Pauses between restarts that bring no new checkpoint. Pure: the operator pauses so, and the agent of a pod."""

MAX_BACKOFF_SECONDS = 3600


def backoff_seconds(failures: int, first: int) -> int:
    """Return the pause after so many failures without a new checkpoint between them: none, `first`, its double, …"""
    if failures < 2:
        return 0
    return min(first << min(failures - 2, 12), MAX_BACKOFF_SECONDS)
