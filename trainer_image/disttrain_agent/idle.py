"""For how long a rank has shown no sign that it gets on, whatever it does, beside how long that took it before.

A sign is a change of what it writes for its agent: a step, a batch of an evaluation, another phase. Where none comes,
what its processes do counts as well: bytes that they read and write, and time of a processor.
"""

from collections.abc import Callable

from disttrain_agent.work import Work
from disttrain_api.report import Idle, RankPhase

LOOK_SECONDS = 5.0
"""Between two looks at what the processes of a rank do that has written nothing for so long."""
_BYTES, _BYTES_PER_SECOND = 2**18, 2**14
_SECONDS, _SHARE = 0.5, 0.03
"""Time of a processor. What a rank does that waits, such as to look for lost peers, is less. A compilation on a
processor that dozens share is more."""


class IdleClock:
    """Counts for one rank, through all of its lives in this pod."""

    def __init__(self, work: Callable[[int], Work | None]) -> None:
        """work: what a process has done so far; None: nobody knows."""
        self._work = work
        self._written: tuple[int, float, RankPhase] | None = None
        self._seconds = self._looked = 0.0
        self._done: Work | None = None
        """When the rank last showed a sign, or at the first look after it."""
        self._longest: dict[RankPhase, float] = {}
        self._over: set[RankPhase] = set()
        """Phases that were over since then."""

    def take(self, written: tuple[int, float, RankPhase] | None, passed: float) -> None:
        """Take what a rank has written: its process, how often it has, and its phase; None: nothing. passed: seconds
        since the last time."""
        former, self._written = self._written, written
        self._seconds += passed
        if former is None or written is None or former[0] != written[0]:
            self._seconds = self._looked = 0.0
            self._done = None
        elif former != written:
            if former[2] != written[2]:
                self._over.add(former[2])
            self._moved(former[2])
            self._done = None
        elif self._seconds - self._looked >= LOOK_SECONDS:
            self._looked = self._seconds
            self._look(written[0], written[2])

    def _moved(self, phase: RankPhase) -> None:
        self._longest[phase] = max(self._longest.get(phase, 0.0), self._seconds)
        self._seconds = self._looked = 0.0

    def _look(self, process: int, phase: RankPhase) -> None:
        now, former = self._work(process), self._done
        if now is None or former is None:
            self._done = now
        elif now.exceeds(
            former, _BYTES + _BYTES_PER_SECOND * self._seconds, max(_SECONDS, _SHARE * self._seconds),
            # It waits for a GPU, and for others on it, without giving the processor away.
            own_seconds=phase not in (RankPhase.EVALUATING, RankPhase.SAVING),
        ):  # fmt: skip
            self._moved(phase)
            self._done = now

    @property
    def idle(self) -> Idle | None:
        """None: the rank does not say what it does, or what its processes do cannot be known."""
        if self._written is None or (self._done is None and self._seconds >= 2 * LOOK_SECONDS):
            return None
        phase = self._written[2]
        longest = self._longest.get(phase, 0.0) if phase in self._over else None
        return Idle(phase=phase, seconds=self._seconds, longest_seconds=longest)
