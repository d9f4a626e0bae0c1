"""Memory of a pod that outlives its ranks and ends with its agent: files without a name, which it alone keeps open.

There is one for marks, and one for each rank's state: ranks with the same state use that of the first of them. A rank
that ends because another one is lost leaves its state there, and the ranks of the next life go on from it
(disttrain_trainer/survivors). No other pod, job or attempt can come by these files, and nothing has to remove them.
"""

import os

from disttrain_agent.environment import PodEnvironment


class PodMemory:
    """Opens the files. Raises OSError."""

    def __init__(self, ranks: int) -> None:
        """ranks: of the pod."""
        self._descriptors: list[int] = []
        for name in ("marks", *(f"state {rank}" for rank in range(ranks))):
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
        return PodMemory(pod.ranks_here)
    except OSError:
        return None
