"""Stacks of the ranks of a running job, as the agents of its pods give them."""

_MAIN = "Current thread "


def main_thread_first(text: str) -> str:
    """Return the stacks of a rank with those of the thread that answered, the main one, before all others."""
    threads = text.strip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith(_MAIN)))
