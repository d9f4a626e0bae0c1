"""From `kubectl apply` to the first training step on real nodes, split into its parts.

    KUBECONFIG=… python benchmarks/start_latency.py [--quick] [--json FILE]

The operator must be installed and its images be on the nodes (`make cluster-up images`, then the chart). The reference
of the first parts is a gang of bare pods of the same image and size, created by the same client in the same run: what
Kubernetes alone needs. The steps of the trainer have no reference.
"""

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kubernetes import client, config, watch
from urllib3.exceptions import ProtocolError

from benchmarks import harness
from disttrain_api.names import API_VERSION, GROUP, KIND, PLURAL, VERSION, Label

PARTS = ("pods created", "pods scheduled", "containers run", "agent runs", "first step done")
WORKERS = 2
PATIENCE_SECONDS = 300


class Timeline:
    """When a gang's pods reached each state, as a watcher of the namespace sees it; seconds of the wall clock."""

    def __init__(self, core: client.CoreV1Api, namespace: str, pods: int) -> None:
        self._core, self._namespace, self._pods = core, namespace, pods
        self._seen: dict[str, dict[str, float]] = {part: {} for part in PARTS[:3]}
        self._complete = threading.Event()
        self._watch = watch.Watch()
        threading.Thread(target=self._follow, daemon=True).start()

    def wait(self) -> dict[str, float]:
        """The time at which the last pod reached each state."""
        if not self._complete.wait(PATIENCE_SECONDS):
            raise TimeoutError(f"not all {self._pods} pods of {self._namespace} ran within {PATIENCE_SECONDS} s")
        self._watch.stop()
        return {part: max(times.values()) for part, times in self._seen.items()}

    def _follow(self) -> None:
        # The stream may end in mid-chunk once nobody needs it any more.
        with suppress(ProtocolError):
            self._read_events()

    def _read_events(self) -> None:
        for event in self._watch.stream(
            self._core.list_namespaced_pod, self._namespace, timeout_seconds=PATIENCE_SECONDS
        ):
            now, pod = time.time(), event["object"]
            containers = pod.status.container_statuses or []
            reached = {
                "pods created": True,
                "pods scheduled": pod.spec.node_name is not None,
                "containers run": any(entry.state.running or entry.state.terminated for entry in containers),
            }
            for part, there in reached.items():
                if there:
                    self._seen[part].setdefault(pod.metadata.name, now)
            if len(self._seen["containers run"]) == self._pods:
                self._complete.set()
                return


@contextmanager
def a_namespace(core: client.CoreV1Api) -> Iterator[str]:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    try:
        yield name
    finally:
        core.delete_namespace(name)


def job(steps: int) -> dict[str, Any]:
    training = {
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "steps": steps,
        "microBatchSize": 16,
        "logging": {"interval": 1},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "start"},
        "spec": {"workers": {"replicas": WORKERS}, "training": training},
    }


def measure_job(core: client.CoreV1Api, jobs: client.CustomObjectsApi) -> dict[str, float]:
    """Seconds from the POST of a job until each part is reached."""
    with a_namespace(core) as namespace:
        timeline = Timeline(core, namespace, WORKERS)
        begin = time.time()
        jobs.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, job(steps=20))
        reached = timeline.wait()
        master = f"{Label.INDEX}=0"
        pod = core.list_namespaced_pod(namespace, label_selector=master).items[0].metadata.name
        reached["agent runs"] = logged(core, namespace, pod, lambda line: True)
        reached["first step done"] = logged(
            core, namespace, pod, lambda line: re.search(r"\bstep: *1\b", line) is not None
        )
        return {part: reached[part] - begin for part in PARTS}


def measure_bare_pods(core: client.CoreV1Api, image: str, pods: int = WORKERS) -> dict[str, float]:
    """The same for bare pods of the same image."""
    with a_namespace(core) as namespace:
        timeline = Timeline(core, namespace, pods)
        begin = time.time()
        for index in range(pods):
            container = {"name": "main", "image": image, "command": ["sleep", "60"], "imagePullPolicy": "IfNotPresent"}
            spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
            core.create_namespaced_pod(namespace, {"metadata": {"name": f"bare-{index}"}, "spec": spec})
        return {part: moment - begin for part, moment in timeline.wait().items()}


def logged(core: client.CoreV1Api, namespace: str, pod: str, claim: Callable[[str], bool]) -> float:
    """When the pod first logged a line that meets the claim, by the node's clock."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for stamp, text in lines_of(core, namespace, pod):
            if claim(text):
                return stamp
        time.sleep(0.2)
    raise TimeoutError(f"{namespace}/{pod} did not log what was waited for within {PATIENCE_SECONDS} s")


def lines_of(
    core: client.CoreV1Api, namespace: str, pod: str, seconds: int | None = None
) -> Iterator[tuple[float, str]]:
    """The lines that a pod has logged in the last seconds, each with the time at which it did, by the node's clock."""
    recent = {} if seconds is None else {"since_seconds": seconds}
    # The bytes themselves: this client turns them into the text of a literal, "b'…'".
    answer = core.read_namespaced_pod_log(pod, namespace, timestamps=True, _preload_content=False, **recent)
    for line in answer.data.decode(errors="replace").splitlines():
        stamp, _, text = line.partition(" ")
        # Nanoseconds are more than fromisoformat reads.
        yield datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp)).timestamp(), text


def trainer_image(core: client.CoreV1Api, jobs: client.CustomObjectsApi) -> str:
    """The image that the installed operator gives to pods."""
    with a_namespace(core) as namespace:
        timeline = Timeline(core, namespace, WORKERS)
        jobs.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, job(steps=1))
        timeline.wait()
        image: str = core.list_namespaced_pod(namespace).items[0].spec.containers[0].image
        return image


def benchmark(quick: bool) -> list[harness.Row]:
    """Rows of the table; seconds."""
    config.load_kube_config()
    core, jobs = client.CoreV1Api(), client.CustomObjectsApi()
    image = trainer_image(core, jobs)
    repeats = 3 if quick else 9
    ours: dict[str, list[float]] = {part: [] for part in PARTS}
    bare: dict[str, list[float]] = {part: [] for part in PARTS[:3]}
    for _ in range(repeats):
        for samples, measured in ((ours, measure_job(core, jobs)), (bare, measure_bare_pods(core, image))):
            for part, seconds in measured.items():
                samples[part].append(seconds)
    return [harness.row(f"apply to {part}", "s", ours[part], bare.get(part, ())) for part in PARTS]


if __name__ == "__main__":
    harness.main(__doc__, benchmark, ["disttrain", "torch", "kopf"])
