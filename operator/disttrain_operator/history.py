"""Keeps what finished jobs came to, in one ConfigMap per namespace, beyond their pods and themselves.

Jobs that finish at about the same time are written together: in each round some namespaces that have new entries, in
turns. A job that is deleted before its namespace's turn is kept until then. An operator that begins to act compares all
finished jobs with what is written. What a namespace refuses, for its quota or for lack of a right, is dropped: nothing
else waits for it.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disttrain_api.history import FINISHED_PHASES, HISTORY_NAME, changes, entry_of
from disttrain_api.names import Label
from disttrain_operator.kept_job import read_status
from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import Conflict, KubeError, NotFound, StandingBy, Unavailable
from disttrain_operator.snapshot import Key, World, core_collection

logger = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
MOST = 20
"""Namespaces of one round."""
MOST_GONE = 1000
"""Entries of jobs that were deleted before they were written, of all namespaces."""
_PER_TURN = 50
"""Jobs that are read in one turn of the event loop."""


@dataclass
class _Unwritten:
    """New entries of a namespace."""

    jobs: dict[str, Raw] = field(default_factory=dict)
    """By uid: jobs as they are kept."""
    gone: dict[str, str] = field(default_factory=dict)
    """Entries of jobs that were deleted meanwhile."""


class History:
    """Run it as a task."""

    def __init__(self, client: Client, most: int) -> None:
        """most: entries of one namespace."""
        self._client, self._most = client, most
        self._turns: dict[str, _Unwritten] = {}
        """By namespace, the next to be written first."""
        self._noted: set[str] = set()
        """Uids of the finished jobs that wait, or are written."""
        self._gone = 0
        """Entries of jobs that were deleted, in all turns."""
        self._acts = False

    def job_changed(self, key: Key, raw: Raw, *, gone: bool) -> None:
        """Note a job that has finished."""
        if not self._acts:
            return
        unwritten = self._turns.get(key.namespace, _Unwritten())
        if raw["phase"] in FINISHED_PHASES and (key.uid not in self._noted or key.uid in unwritten.jobs):
            self._noted.add(key.uid)
            self._turns.setdefault(key.namespace, unwritten).jobs[key.uid] = raw
        if gone:
            self._noted.discard(key.uid)
            self._keep_gone(key)

    def begin(self, world: World) -> None:
        """This replica acts from now on. What another has written is not known."""
        self._turns.clear()
        self._noted.clear()
        self._gone, self._acts = 0, True
        for key in world.all_keys():
            if (raw := world.jobs.get(key.uid)) is not None:
                self.job_changed(key, raw, gone=False)

    async def run(self) -> None:
        """Write, round after round, until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self) -> None:
        """Write the entries of some namespaces."""
        for namespace in list(self._turns)[:MOST]:
            unwritten = self._turns.pop(namespace)
            self._gone -= len(unwritten.gone)
            try:
                await self._write(namespace, self._last(await self._entries(unwritten.jobs) | unwritten.gone))
            except StandingBy:
                self._acts = False
                return
            except (Conflict, Unavailable) as error:
                logger.debug("the history of namespace %s is written later: %s", namespace, error)
                later = self._turns.pop(namespace, _Unwritten())
                self._turns[namespace] = _Unwritten(unwritten.jobs | later.jobs, unwritten.gone | later.gone)
                self._gone += len(unwritten.gone)
            except NotFound:
                logger.debug("namespace %s is gone, and its history with it", namespace)
            except KubeError as error:
                logger.warning("the history of namespace %s was not written: %s", namespace, error)
            except Exception:
                # Whatever it is, it costs these entries and nothing else.
                logger.exception("the history of namespace %s was not written", namespace)

    async def _entries(self, jobs: Mapping[str, Raw]) -> dict[str, str]:
        found = dict[str, str]()
        for number, raw in enumerate(jobs.values(), 1):
            if (entry := entry_of(raw["metadata"], read_status(raw))) is not None:
                found[entry[0]] = entry[1]
            if number % _PER_TURN == 0:
                found = self._last(found)
                await asyncio.sleep(0)
        return found

    def _last(self, entries: Mapping[str, str]) -> dict[str, str]:
        return {key: entries[key] for key in sorted(entries)[-self._most :]}

    async def _write(self, namespace: str, new: Mapping[str, str]) -> None:
        if not new:
            return
        collection = core_collection("configmaps", namespace)
        try:
            present: Any = await self._client.get(f"{collection}/{HISTORY_NAME}")
        except NotFound:
            metadata = {"name": HISTORY_NAME, "labels": {Label.MANAGED_BY: Label.MANAGER}}
            data = changes(None, new, self._most)
            await self._client.create(
                collection, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            )
            return
        if changed := changes(present.get("data"), new, self._most):
            version = present["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "data": changed}
            await self._client.patch(f"{collection}/{HISTORY_NAME}", patch)

    def _keep_gone(self, key: Key) -> None:
        """Keep the entry of a job that is gone, and nothing else of it; MOST_GONE entries at most."""
        unwritten = self._turns.get(key.namespace, _Unwritten())
        raw = unwritten.jobs.pop(key.uid, None)
        if raw is None or self._gone >= MOST_GONE:
            return
        if (entry := entry_of(raw["metadata"], read_status(raw))) is not None:
            unwritten.gone[entry[0]] = entry[1]
            self._gone += 1
