"""From winning the election to acting: what this replica sees must not be older than its leadership."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from disttrain_operator.kube.errors import KubeError
from disttrain_operator.kube.informer import Informer
from disttrain_operator.kube.lease import Election

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2


class Leadership:
    """`acts` is true while this replica leads and has caught up. Without an election it always does."""

    def __init__(
        self, election: Election | None, informers: Sequence[Informer], begin: Callable[[], None] = lambda: None
    ) -> None:
        """`informers` in the order in which they catch up: pods after jobs, so that none seems lost. `begin` is called
        each time when this replica begins to act."""
        self._election, self._informers, self._begin = election, informers, begin
        self._caught_up = election is None

    @property
    def acts(self) -> bool:
        """Whether this replica may write now."""
        return self._caught_up and (self._election is None or self._election.leads)

    def describe(self) -> str:
        """One line for people."""
        if self._election is None:
            return "acts alone, without an election"
        if self.acts:
            return f"leads as {self._election.me}"
        if self._election.leads:
            return f"leads as {self._election.me}, catching up"
        return f"stands by as {self._election.me}; the leader is {self._election.holder or 'nobody'}"

    async def run(self) -> None:
        """Follows the election. Never returns."""
        if self._election is None:
            self._begin()
            return
        while True:
            await self._election.changed.wait()
            self._election.changed.clear()
            self._caught_up = False
            if self._election.leads:
                await self._catch_up(self._election)

    async def _catch_up(self, election: Election) -> None:
        # What the former leader did a moment ago may not have reached us: its pods would look lost.
        while election.leads:
            try:
                for informer in self._informers:
                    await informer.catch_up()
            except KubeError as error:
                logger.info("catching up again: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._caught_up = True
            self._begin()
            return
