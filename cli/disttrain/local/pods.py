"""An in-memory cluster: raw pods in Kubernetes' shape, each a process below a keeper (kept.py)."""

import asyncio
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from disttrain.local.folder import RunFolder
from disttrain.local.kept import KILL, TERMINATE, ForkServer, Kept
from disttrain.local.launch import Launch
from disttrain_api.names import CONTAINER, Label
from disttrain_api.program_log import of_torchrun_child

RawPod = dict[str, Any]

_START_ERROR = 128
# As the kubelet reads of a termination message.
_MESSAGE_BYTES = 4096
# The kubelet does it for terminationMessagePolicy FallbackToLogsOnError, with half as much.
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 160


class Pods:
    """Creates, deletes and watches pods. `on_change` is called whenever one of them changes.

    modules: what their ranks import; empty: each imports it for itself.
    """

    def __init__(self, folder: RunFolder, on_change: Callable[[], None], modules: Sequence[str] = ()) -> None:
        self._folder, self._on_change = folder, on_change
        self._fork_server = ForkServer(modules)
        self._pods: dict[str, _Pod] = {}
        self._gone: list[RawPod] = []

    @property
    def raw(self) -> list[RawPod]:
        """Pods that exist."""
        return [pod.raw for pod in self._pods.values()]

    @property
    def gone(self) -> list[RawPod]:
        """Deleted pods, as they were last seen."""
        return self._gone

    @property
    def alive(self) -> list[str]:
        """Names of pods with a process."""
        return [name for name, pod in self._pods.items() if pod.process is not None]

    async def create(self, manifest: RawPod, launch: Launch) -> None:
        """Create a pod and start its process. What cannot be started is a pod that failed to start."""
        pod = _Pod(manifest)
        self._pods[pod.name] = pod
        try:
            self._folder.scratch(pod.name).mkdir(parents=True, exist_ok=True)
            pod.process = await self._fork_server.start(launch, self._folder.log(pod.name))
        except OSError as error:
            pod.cannot_start(error)
            self._on_change()
            return
        pod.run()
        pod.watcher = asyncio.create_task(self._watch(pod, pod.process))
        self._on_change()

    def delete(self, name: str, uid: str, grace_seconds: float | None) -> None:
        """Delete a pod as the API server does: SIGTERM now, SIGKILL when the grace period ends, then the pod
        disappears."""
        pod = self._pods.get(name)
        if pod is None or pod.uid != uid:
            return
        pod.raw["metadata"].setdefault("deletionTimestamp", _now())
        if pod.process is None:
            self._vanish(pod)
            return
        grace = pod.grace_seconds if grace_seconds is None else grace_seconds
        pod.order(TERMINATE)
        loop = asyncio.get_running_loop()
        pod.timers.append(loop.call_later(grace, pod.order, KILL))

    def forget_gone_before(self, attempt: int) -> None:
        """Forget deleted pods of older attempts: the status has their results."""
        self._gone = [pod for pod in self._gone if int(pod["metadata"]["labels"][Label.ATTEMPT]) >= attempt]

    def kill_all(self) -> None:
        """SIGKILL to everything, now."""
        for pod in self._pods.values():
            pod.order(KILL)

    async def close(self) -> None:
        """No process outlives this."""
        self.kill_all()
        await asyncio.gather(*(pod.watcher for pod in self._pods.values() if pod.watcher is not None))
        await self._fork_server.close()

    async def _watch(self, pod: "_Pod", process: Kept) -> None:
        try:
            code = await process.wait()
            message = _read(self._folder.termination_log(pod.name)) or (
                _tail(self._folder.log(pod.name)) if code else ""
            )
            pod.end(code, "Error" if code else "Completed", message)
        except OSError as error:
            pod.cannot_start(error)
        pod.process = None
        for timer in pod.timers:
            timer.cancel()
        if "deletionTimestamp" in pod.raw["metadata"]:
            self._vanish(pod)
        self._on_change()

    def _vanish(self, pod: "_Pod") -> None:
        del self._pods[pod.name]
        self._gone.append(pod.raw)
        self._folder.forget_pod(pod.name)
        self._on_change()


class _Pod:
    """A raw pod and its process."""

    def __init__(self, manifest: RawPod) -> None:
        metadata = {**manifest["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        self.raw: RawPod = {**manifest, "metadata": metadata, "status": {"phase": "Pending"}}
        self.process: Kept | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self._started = _now()

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def grace_seconds(self) -> float:
        return float(self.raw["spec"]["terminationGracePeriodSeconds"])

    def order(self, letter: bytes) -> None:
        """An order to the keeper, if it still lives."""
        if self.process is not None:
            self.process.order(letter)

    def run(self) -> None:
        self._set("Running", {"running": {"startedAt": self._started}}, ready=True)

    def end(self, code: int, reason: str, message: str) -> None:
        ended = {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": self._started,
            "finishedAt": _now(),
        }
        self._set("Failed" if code else "Succeeded", {"terminated": ended}, ready=False)

    def cannot_start(self, error: OSError) -> None:
        what = f": {error.filename}" if error.filename else ""
        self.end(_START_ERROR, "StartError", f"cannot start: {error.strerror}{what}")

    def _set(self, phase: str, state: RawPod, *, ready: bool) -> None:
        container = {"name": CONTAINER, "ready": ready, "restartCount": 0, "state": state}
        self.raw = {**self.raw, "status": {"phase": phase, "containerStatuses": [container]}}


def _now() -> str:
    # Finer than the kubelet's whole seconds: it tells which of two processes ended first.
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MESSAGE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    kept = of_torchrun_child("\n".join(log_tail(path, 10 * _LOG_TAIL_LINES)))
    lines = kept[-_LOG_TAIL_BYTES:].splitlines()[-_LOG_TAIL_LINES:]
    if is_full(path.parent):
        # What the program had to say of it may not have found room.
        lines.append(f"no space is left on the disk of {path.parent}")
    return "\n".join(lines)


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no block for another file."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail < 1


def log_tail(path: Path, lines: int, limit: int = 64 * 1024) -> list[str]:
    """The last lines of a log, empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return list(_lines(file.read()))[-lines:]
    except OSError:
        return []


def _lines(data: bytes) -> Iterator[str]:
    for line in data.decode(errors="replace").splitlines():
        if line.strip():
            yield line.rstrip()
