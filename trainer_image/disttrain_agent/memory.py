"""Memory of a pod that outlives its ranks and ends with its agent: two files without a name, which it alone keeps open.

A rank that ends because another one is lost leaves its state there, and the ranks of the next life go on from it
(disttrain_trainer/survivors). No other pod, job or attempt can come by these files, and nothing has to remove them.
"""

import os

from disttrain_agent.environment import PodEnvironment

FILES = ("marks", "state")


class PodMemory:
    """Opens the files. Raises OSError."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        for name in FILES:
            self._descriptors.append(os.memfd_create(name))

    @property
    def place(self) -> str:
        """The paths by which processes of this pod find the files, joined by a colon."""
        return ":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors)

    def close(self) -> None:
        """Give the memory back; what a rank still reads lasts as long as that rank."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def open_memory(pod: PodEnvironment) -> PodMemory | None:
    """Return the memory of a pod whose ranks start again in it; None where they do not, or the system has no such
    files: the next life then begins with a checkpoint."""
    if pod.restarts_in_place is None or pod.config is None or not hasattr(os, "memfd_create"):
        return None
    try:
        return PodMemory()
    except OSError:
        return None
