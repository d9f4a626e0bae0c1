"""Somebody who runs pods, no node, no container, only what the API server would get of them; and a witness.

They follow the pods of all namespaces by a watch, which they open anew whenever it breaks, and talk to the API server
directly: faults between the operator and the API server do not concern them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp

from tests.integration.background import InBackground
from tests.integration.operator_process import eventually
from tools.cluster.control_plane import ControlPlane

Raw = dict[str, Any]
SELECTOR = "app.kubernetes.io/managed-by=disttrain"


@dataclass(frozen=True)
class Fate:
    """What becomes of a pod."""

    exit_code: int | None = None
    """None: it runs until it is deleted."""
    after_seconds: float = 0.0
    """How long it runs before it ends."""


def succeeds(_: Raw) -> Fate:
    """Every pod ends well at once."""
    return Fate(exit_code=0)


def runs(_: Raw) -> Fate:
    """No pod ends by itself."""
    return Fate()


class Follower(InBackground):
    """Sees every version of every pod of the operator's. Once it has begun none comes into being unseen."""

    def __init__(self, control_plane: ControlPlane) -> None:
        super().__init__()
        certificate = control_plane.certificate("kubelet-stand-in", "kubelet-stand-in", "system:masters")
        self._tls = ssl.create_default_context(cafile=str(control_plane.root_certificate))
        self._tls.load_cert_chain(str(certificate.certificate), str(certificate.key))
        self._server = control_plane.url
        self._session: aiohttp.ClientSession

    async def main(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=90)
        connector = aiohttp.TCPConnector(limit=16, ssl=self._tls)
        self._session = aiohttp.ClientSession(self._server, connector=connector, timeout=timeout)
        try:
            while True:
                try:
                    await self._follow()
                except (aiohttp.ClientError, OSError, ValueError):
                    await asyncio.sleep(0.1)
        finally:
            self.ended()
            await self._session.close()

    async def _follow(self) -> None:
        async with self._session.get("/api/v1/pods", params={"labelSelector": SELECTOR}) as answer:
            answer.raise_for_status()
            listed = await answer.json()
        for pod in listed["items"]:
            self.see(pod)
        self.begun()
        query = {"labelSelector": SELECTOR, "watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
        async with self._session.get("/api/v1/pods", params=query, read_bufsize=2**22) as stream:
            stream.raise_for_status()
            async for line in stream.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] != "DELETED":
                    self.see(event["object"])

    def see(self, pod: Raw) -> None:
        """A version of a pod, in its loop."""
        raise NotImplementedError

    def ended(self) -> None:
        """It follows no longer."""


class Witness(Follower):
    """Remembers every pod that it has seen."""

    def __init__(self, control_plane: ControlPlane) -> None:
        super().__init__(control_plane)
        self._versions: dict[str, dict[str, set[str]]] = {}

    def see(self, pod: Raw) -> None:
        about = pod["metadata"]
        versions = self._versions.setdefault(about["namespace"], {})
        versions.setdefault(about["uid"], set()).add(about["resourceVersion"])

    def made_until(self, pods: list[Raw]) -> int:
        """How many pods came into being in the namespace of these, up to these versions of them."""
        (namespace,) = {pod["metadata"]["namespace"] for pod in pods}
        versions = self._versions.get(namespace, {})
        wanted = [(pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]) for pod in pods]
        eventually(lambda: all(version in versions.get(uid, ()) for uid, version in wanted), lambda: wanted)
        return len(versions)


class Kubelet(Follower):
    """Runs every pod it sees, and lets it end as `fate_of` says, which is asked once per pod."""

    def __init__(self, control_plane: ControlPlane, fate_of: Callable[[Raw], Fate] = runs) -> None:
        super().__init__(control_plane)
        self._fate_of = fate_of
        self._fates: dict[str, Fate] = {}
        self._latest: dict[str, Raw] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}

    def ended(self) -> None:
        for life in self._lives.values():
            life.cancel()

    def see(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        self._latest[uid] = pod
        if uid not in self._lives:
            task = self._lives[uid] = self.loop.create_task(self._live(uid))
            task.add_done_callback(lambda done: self._done(uid, done))

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._lives[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _live(self, uid: str) -> None:
        """What is to be done about the newest version of a pod; a newer one brings the next step."""
        while (pod := self._latest.pop(uid, None)) is not None:
            try:
                await self._step(pod)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.2)
                self._latest.setdefault(uid, pod)

    async def _step(self, pod: Raw) -> None:
        status = pod.get("status") or {}
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        fate = self._fates.setdefault(pod["metadata"]["uid"], self._fate_of(pod))
        if "deletionTimestamp" in pod["metadata"]:
            await self._ask("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}})
        elif status.get("phase") == "Pending":
            await self._set(path, pod, "Running", {"running": {"startedAt": _now()}})
            if fate.exit_code is not None:
                await asyncio.sleep(fate.after_seconds)
                await self._end(path, pod, fate.exit_code)
        elif status.get("phase") == "Running" and fate.exit_code is not None:
            await self._end(path, pod, fate.exit_code)

    async def _end(self, path: str, pod: Raw, code: int) -> None:
        state = {"exitCode": code, "finishedAt": _now(), "reason": "Error" if code else "Completed"}
        await self._set(path, pod, "Failed" if code else "Succeeded", {"terminated": state})

    async def _set(self, path: str, pod: Raw, phase: str, state: Raw) -> None:
        containers = [
            {
                "name": container["name"],
                "image": container.get("image", ""),
                "imageID": "",
                "ready": phase == "Running",
                "restartCount": 0,
                "state": state,
            }
            for container in pod["spec"]["containers"]
        ]
        # With the uid: the name may be another pod's by now.
        change = {
            "metadata": {"uid": pod["metadata"]["uid"]},
            "status": {"phase": phase, "containerStatuses": containers},
        }
        await self._ask("PATCH", f"{path}/status", change)

    async def _ask(self, method: str, path: str, body: Raw) -> None:
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        async with self._session.request(
            method, path, data=json.dumps(body), headers={"Content-Type": content}
        ) as answer:
            await answer.read()
            if answer.status not in (200, 201, 202, 404, 409, 422):
                answer.raise_for_status()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
