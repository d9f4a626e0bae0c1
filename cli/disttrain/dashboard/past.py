"""Finished jobs that were deleted, of the history of their namespaces, as jobs of the pages."""

import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from disttrain.client import Client
from disttrain.errors import CommandError
from disttrain.views.history import paragraph
from disttrain_api.history import HistoryEntry
from disttrain_dashboard.source import Job, Seen

MAX_PAST = 200
"""The most that are listed, of those that finished last."""
READ_SECONDS = 60.0
"""How long the history of many namespaces is not read again."""


class Past:
    """The history of all namespaces, or of some; of those whose ConfigMaps may not be read there is none."""

    def __init__(self, client: Client, namespaces: Sequence[str]) -> None:
        """namespaces: none: all."""
        self._client, self._namespaces = client, namespaces
        self._entries: list[HistoryEntry] = []
        self._until, self._lock = float("-inf"), threading.Lock()

    def listed(self, present: Collection[str], most: int, now: float) -> list[Job]:
        """Return the jobs without those whose uids are present, the last finished first."""
        with self._lock:
            if now >= self._until:
                self._entries, self._until = self._read(), now + READ_SECONDS
            entries = self._entries
        return [job_of(entry) for entry in entries if entry.uid not in present][: min(most, MAX_PAST)]

    def find(self, namespace: str, name: str, uid: str | None = None) -> HistoryEntry | None:
        """Return the last job of this name, or the one with this uid."""
        known = self._of(namespace)
        return next((entry for entry in known if entry.name == name and uid in (None, entry.uid)), None)

    def _read(self) -> list[HistoryEntry]:
        if self._namespaces:
            found = [entry for namespace in self._namespaces for entry in self._of(namespace)]
            return sorted(found, key=lambda entry: entry.completion_time, reverse=True)
        with suppress(CommandError):
            return self._client.history(all_namespaces=True)
        return []

    def _of(self, namespace: str) -> list[HistoryEntry]:
        with suppress(CommandError):
            return Client.of(self._client.api, namespace).history()
        return []


def seen(entry: HistoryEntry) -> Seen:
    """Return what is known of a job that was deleted."""
    return Seen(job_of(entry), paragraph(entry, datetime.now(UTC)))


def job_of(entry: HistoryEntry) -> Job:
    """Return a job that was deleted as the API server held it, as far as that is known."""
    known = entry.model_dump(mode="json", by_alias=True, exclude_none=True)
    metadata = {key: known[key] for key in ("name", "namespace", "uid")}
    metadata["creationTimestamp"] = known.get("creationTime")
    kept = ("phase", "completionTime", "restarts", "mesh", "worldSize", "progress", "checkpoint", "goodput")
    status = {key: known[key] for key in kept if key in known} | {"attempt": entry.attempts}
    return Job(f"{entry.namespace}/{entry.name}/{entry.uid}", {"metadata": metadata, "status": status}, deleted=True)
