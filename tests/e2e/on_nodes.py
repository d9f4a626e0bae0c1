"""What this machine sees of the nodes of its cluster: the processes and files of a job, and all of a node."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import ranks_of
from tests.e2e.kubectl import PATIENCE, Kubectl
from tests.waiting import until
from tools.cluster import cgroups
from tools.cluster.nodes import NODES
from tools.cluster.processes import ProcessId, marked

JOB_NAME = "disttrain.io/job-name"


class OnNodes:
    """A job of which no two lives may ever be seen side by side."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self._kubectl, self._name = kubectl, name
        self._pods: dict[str, str] = {}
        self._storage: Path | None = None

    @property
    def uids(self) -> dict[str, str]:
        """The uids of its pods, by name."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self._kubectl.pods(self._name)}

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The condition's first answer that is true."""
        return until(condition, lambda: f"{what}\n{self._kubectl.describe_job(self._name)}", seconds=PATIENCE)

    def below(self) -> list[psutil.Process]:
        """All processes of its pods."""
        found = self._processes()
        if not found or not all(found.values()):
            # A pod has gone, and another one may be in its place.
            self._pods = {uid: name for name, uid in self.uids.items()}
            found = self._processes()
        return [process for processes in found.values() for process in processes]

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks that run, by rank."""
        return ranks_of(self.below())

    def _processes(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {uid: [] for uid in self._pods}
        for path in Path("/proc").glob("[0-9]*/cgroup"):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                text = path.read_text()
                for uid in [uid for uid in found if f"/pod{uid}/" in text]:
                    found[uid].append(psutil.Process(int(path.parent.name)))
        return found

    def log(self, worker: int, attempt: int) -> str:
        """Log of a worker whose pod is there."""
        labels = {"role": "worker", "index": worker, "attempt": attempt}
        selected = ",".join([f"{JOB_NAME}={self._name}", *(f"disttrain.io/{key}={labels[key]}" for key in labels)])
        return self._kubectl("logs", "-l", selected, "-c", "trainer", "--tail=-1")

    @property
    def seen_status(self) -> dict[str, Any]:
        """The job's status."""
        return self._kubectl.status(self._name)

    @property
    def storage(self) -> Path:
        """What the pods have as /checkpoints."""
        if self._storage is None:
            (claim,) = self._kubectl.get("pvc", "-l", f"{JOB_NAME}={self._name}")["items"]
            volume = self._kubectl.get("pv", claim["spec"]["volumeName"])
            self._storage = Path(volume["spec"]["hostPath"]["path"])
        return self._storage

    @property
    def metrics(self) -> str:
        """Text of metrics.jsonl; none before it is there."""
        return "".join(path.read_text() for path in self.storage.glob("*/metrics.jsonl"))


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Inside, these processes are stopped; those that are still there then go on."""
    for process in processes:
        process.suspend()
    try:
        until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in processes), "they are stopped")
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def stopped_node(name: str) -> Iterator[None]:
    """Inside, all processes of the node are stopped: its daemons, and all of its pods."""
    (node,) = [node for node in NODES if node.name == name]

    def there() -> list[ProcessId]:
        return [*(one.process for one in marked(node.folder)), *cgroups.processes(node.cgroup)]

    for process in there():
        process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in there():
            process.signal(signal.SIGCONT)
