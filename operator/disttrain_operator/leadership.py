"""From winning the election to acting: what this replica sees must not be older than its leadership."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from disttrain_operator.kube.elections import AnyElection
from disttrain_operator.kube.errors import KubeError
from disttrain_operator.kube.watch import Watch

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2


class Leadership:
    """`acts` is true while this replica leads and has caught up. Without an election it always does."""

    def __init__(self, election: AnyElection | None) -> None:
        self._election = election
        self._caught_up = election is None

    def acts(self) -> bool:
        """Whether this replica may write now."""
        return self._caught_up and (self._election is None or self._election.leads)

    def describe(self) -> str:
        """One line for people."""
        if self._election is None:
            return "acts alone, without an election"
        if self.acts():
            return f"leads as {self._election.me}"
        if self._election.leads:
            return f"leads as {self._election.me}, catching up"
        return f"stands by as {self._election.me}{_of_leader(self._election)}"

    async def run(
        self, watches: Sequence[Watch], begin: Callable[[], None], end: Callable[[], None] = lambda: None
    ) -> None:
        """Follows the election; does not return where there is one. `watches` catch up in their order: pods after jobs,
        so that none seems lost. `begin` is called each time when this replica begins to act, `end` when it may not any
        more."""
        if self._election is None:
            begin()
            return
        while True:
            await self._election.changed.wait()
            self._election.changed.clear()
            self._caught_up = False
            end()
            self._log(self._election)
            if self._election.leads:
                await self._catch_up(self._election, watches, begin)

    def _log(self, election: AnyElection) -> None:
        foreign = election.superseded_by is not None or _other_release(election) is not None
        logger.log(logging.WARNING if foreign and not election.leads else logging.INFO, self.describe())

    async def _catch_up(self, election: AnyElection, watches: Sequence[Watch], begin: Callable[[], None]) -> None:
        # What the former leader did a moment ago may not have reached us: its pods would look lost.
        while election.leads:
            try:
                for watch in watches:
                    await watch.catch_up()
            except KubeError as error:
                logger.info("catching up again: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._caught_up = True
            begin()
            return


def _of_leader(election: AnyElection) -> str:
    if election.superseded_by is not None:
        other = _release(election.superseded_by)
        named = f"release {other}" if other else "another operator"
        return f": {named} serves all namespaces, and so this one's; uninstall one of the two releases"
    rival = _other_release(election)
    if rival is not None:
        advice = "uninstall one of the two releases, or let each watch namespaces of its own"
        return f": release {rival} serves the same jobs; {advice}"
    return f"; the leader is {election.holder or 'nobody'}"


def _other_release(election: AnyElection) -> str | None:
    """The release that leads, where it is not that of this replica."""
    own, leading = _release(election.me), _release(election.holder)
    return leading if own and leading and own != leading else None


def _release(identity: str) -> str:
    """ "namespace/release/replica" -> "namespace/release"; "" where there is none."""
    return identity.rpartition("/")[0]
