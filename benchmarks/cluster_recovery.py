"""How long a job of two pods on real nodes takes to train again after a rank or a pod was lost.

    KUBECONFIG=… python benchmarks/cluster_recovery.py [--quick] [--json FILE]

The operator must be installed and its images be on the nodes (`make cluster-up cluster-images`, then the chart); the
checkpoints are on volumes of the test cluster's class. From SIGKILL of rank 1, from the forced deletion of its pod or
of worker 0's, or from the power cut of the node below worker 1's pod, to the first step that rank 0 logs after it, with
`restartStrategy: InPlace` beside the same job with Recreate in the same run. A rank is killed once the zygotes are
ready. A lost pod is recreated alone; its other references are what an empty pod of the same image takes to run, and
what a program takes in one that imports nothing but torch and does a step of DDP alone. A node is cut on the cluster
that tools/cluster starts alone, never that of the replica of the operator that leads, and comes back before the next
job. Times are the nodes' own.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kubernetes import client, config
from kubernetes.stream import stream

from benchmarks import harness
from benchmarks.local_job import BEGINS, STEP, TRAINING
from benchmarks.recovery import p95
from benchmarks.start_latency import a_namespace, lines_of, measure_bare_pods, trainer_image
from disttrain_api.names import API_VERSION, GROUP, KIND, PLURAL, VERSION, Label
from tools.cluster import full

NAME = "recovery"
PATIENCE_SECONDS = 300
TRIES = 4
"""Jobs for each node that is to be lost."""
STORAGE_CLASS = "disttrain-shared"
LEASE = "disttrain-operator"
_SIGNAL_THE_RANK = """
import os, signal, time
def read(pid, name):
    return open(f"/proc/{pid}/{name}", "rb").read()
def is_rank(pid):
    words, variables = (read(pid, name).split(bytes(1)) for name in ("cmdline", "environ"))
    started = b"disttrain_trainer" in words and any(word.startswith(b"RANK=") for word in variables)
    return started or read(pid, "comm").startswith(b"rank ")
(rank,) = filter(is_rank, filter(str.isdigit, os.listdir("/proc")))
print(time.time(), flush=True)
os.kill(int(rank), signal.SIGNAL)
"""
"""Prints when."""
ONE_STEP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("one step is done", flush=True)
"""
HAS_A_ZYGOTE = """
import glob
print(any(open(path).read() == "zygote\\n" for path in glob.glob("/proc/[0-9]*/comm")))
"""


class Gang:
    """A job of two pods in a namespace of its own."""

    def __init__(self, core: client.CoreV1Api, namespace: str, strategy: str) -> None:
        self._core, self._namespace, self._jobs = core, namespace, client.CustomObjectsApi()
        self._jobs.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, job(strategy))

    def trains(self, since: float) -> float:
        """When rank 0 logged its first step of a life that began after that time."""

        def stepped() -> float | None:
            began = False
            for stamp, line in self._log(since):
                if stamp > since and BEGINS.search(line):
                    began = True
                elif began and STEP.search(line):
                    return stamp
            return None

        return until(stepped, "a step is logged")

    def signal_rank(self, worker: int, name: str) -> float:
        """Send the rank of a worker a signal, such as SIGKILL; returns when."""
        return float(self.run(self.pod(worker), _SIGNAL_THE_RANK.replace("SIGNAL", name)))

    def has_zygotes(self) -> None:
        """Return when each pod has its zygote."""
        pods = [self.pod(index) for index in range(2)]
        until(lambda: all(self.run(pod, HAS_A_ZYGOTE).strip() == "True" for pod in pods), "the zygotes are ready")

    def lose_pod(self, worker: int) -> float:
        """Delete a worker's pod by force; returns when."""
        self.has_checkpoint()
        name = self.pod(worker)
        began = time.time()
        self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)
        return began

    def has_checkpoint(self) -> None:
        """Return when there is something to go on from."""
        until(self._has_new_checkpoint, "there is a checkpoint since the last loss")

    def pod(self, index: int) -> str:
        """The name of the newest pod with that index."""
        return str(self._newest(index).metadata.name)

    def nodes(self) -> list[str]:
        """The nodes of both pods."""
        return [str(self._newest(index).spec.node_name) for index in range(2)]

    def _newest(self, index: int) -> Any:
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=f"{Label.INDEX}={index}").items
        return max(pods, key=lambda pod: pod.metadata.creation_timestamp)

    def _log(self, since: float) -> list[tuple[float, str]]:
        try:
            return list(lines_of(self._core, self._namespace, self.pod(0), seconds=int(time.time() - since) + 5))
        except (client.ApiException, ValueError):
            # It does not run yet, or is about to be replaced.
            return []

    def _has_new_checkpoint(self) -> bool:
        found = self._jobs.get_namespaced_custom_object_status(GROUP, VERSION, self._namespace, PLURAL, NAME)["status"]
        attempt = found["attempts"][-1]
        lost = [entry["checkpointStep"] for entry in attempt.get("replacements", []) if "checkpointStep" in entry]
        return "checkpoint" in found and found["checkpoint"]["step"] > max(lost, default=0)

    def run(self, pod: str, script: str) -> str:
        """Return what a Python script prints in a pod."""
        return str(
            stream(
                self._core.connect_get_namespaced_pod_exec,
                pod,
                self._namespace,
                container="trainer",
                command=["python3", "-c", script],
                stdout=True,
                stderr=True,
            )
        )


def job(strategy: str) -> dict[str, Any]:
    # Apart where there is room: a node is to be lost with one pod.
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    apart |= {"labelSelector": {"matchLabels": {Label.ROLE: "worker"}}}
    apart |= {"matchLabelKeys": [Label.JOB_UID, Label.ATTEMPT]}
    claim = {"storageClassName": STORAGE_CLASS, "accessModes": ["ReadWriteMany"]}
    claim |= {"resources": {"requests": {"storage": "1Gi"}}}
    container = {"name": "trainer", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}
    spec = {
        "workers": {
            "replicas": 2,
            "template": {"spec": {"containers": [container], "topologySpreadConstraints": [apart]}},
        },
        "storage": {"volumeClaimTemplate": {"spec": claim}},
        "training": TRAINING | {"checkpoint": {"interval": 500, "keepLatest": 2}},
        "runPolicy": {"restartStrategy": strategy, "maxRestarts": 1000, "restartBackoffSeconds": 0},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": NAME}, "spec": spec}


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return what the condition returned, once it is true. Raises TimeoutError where it is not in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        # Each look is work of the API server's, on processors that the ranks may share.
        time.sleep(0.3)
    raise TimeoutError(f"not so within {PATIENCE_SECONDS} s: {what}")


def recoveries(core: client.CoreV1Api, strategy: str, kills: int, lost: int | None) -> list[float]:
    """Seconds that follow each kill. lost: the worker whose pod is lost; None: a rank is."""
    taken = []
    with a_namespace(core) as namespace:
        began = time.time()
        gang = Gang(core, namespace, strategy)
        for _ in range(kills):
            gang.trains(began)
            if strategy == "InPlace" and lost is None:
                gang.has_zygotes()
            began = gang.signal_rank(1, "SIGKILL") if lost is None else gang.lose_pod(lost)
            taken.append(gang.trains(began) - began)
    return taken


def recoveries_of_nodes(core: client.CoreV1Api, strategy: str, kills: int) -> list[float]:
    """Seconds that follow each power cut, each with a job of its own. Jobs whose second pod alone is not on a node that
    may be cut are given up."""
    taken = list[float]()
    for _ in range(TRIES * kills):
        with a_namespace(core) as namespace:
            began, gang = time.time(), Gang(core, namespace, strategy)
            gang.trains(began)
            first, second = gang.nodes()
            if second in (first, leaders_node(core)):
                continue
            gang.has_checkpoint()
            began = time.time()
            try:
                full.kill_node(second)
                taken.append(gang.trains(began) - began)
            finally:
                full.start_node(second)
                until(lambda node=second: is_ready(core.read_node(node)), "the node is back")
        if len(taken) == kills:
            return taken
    raise RuntimeError(
        f"of {TRIES * kills} jobs {len(taken)} had their second pod on a node of its own without the operator's leader"
    )


def seconds_of_bare_program(core: client.CoreV1Api, image: str) -> float:
    """From the creation of a pod until ONE_STEP has done its step in it."""
    with a_namespace(core) as namespace:
        variables = [{"name": "OMP_NUM_THREADS", "value": "1"}]
        container = {"name": "main", "image": image, "command": ["python3", "-c", ONE_STEP], "env": variables}
        spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
        began = time.time()
        core.create_namespaced_pod(namespace, {"metadata": {"name": "bare"}, "spec": spec})
        until(lambda: core.read_namespaced_pod("bare", namespace).status.phase == "Succeeded", "the step is done")
        return next(stamp for stamp, line in lines_of(core, namespace, "bare") if "one step" in line) - began


def leaders_node(core: client.CoreV1Api) -> str | None:
    """The node of the operator's replica that leads, as its Lease says."""
    leases = client.CoordinationV1Api().list_lease_for_all_namespaces(field_selector=f"metadata.name={LEASE}").items
    leaders = {name_in_lease(lease.spec.holder_identity or "") for lease in leases}
    pods = core.list_pod_for_all_namespaces(label_selector="app.kubernetes.io/name=disttrain-operator").items
    return next((str(pod.spec.node_name) for pod in pods if pod.metadata.name in leaders), None)


def name_in_lease(holder: str) -> str:
    """The pod's name in "namespace/release/pod_number"."""
    return holder.rpartition("/")[2].rpartition("_")[0]


def is_ready(node: Any) -> bool:
    """Whether the cluster takes a node for one that lives."""
    return any((one.type, one.status) == ("Ready", "True") for one in node.status.conditions)


def measure(quick: bool) -> Iterator[harness.Row]:
    config.load_kube_config()
    core = client.CoreV1Api()
    kills, recreations = (2, 1) if quick else (20, 5)
    image = trainer_image(core, client.CustomObjectsApi())
    empty = [measure_bare_pods(core, image, pods=1)["containers run"] for _ in range(recreations)]
    bare = [seconds_of_bare_program(core, image) for _ in range(recreations)]
    for name, lost in (("a rank", None), ("worker 1's pod", 1), ("worker 0's pod", 0)):
        in_place = recoveries(core, "InPlace", kills, lost)
        recreated = recoveries(core, "Recreate", recreations, lost)
        yield harness.row(f"{name} lost, in place", "s", in_place, recreated)
        yield harness.Row(f"{name} lost, in place, p95", p95(in_place), "s", p95(recreated), kills)
        if lost is not None:
            yield harness.row(f"{name} lost, beside an empty pod's start", "s", in_place, empty)
            yield harness.row(f"{name} lost, beside a bare program's first step", "s", in_place, bare)
    if Path(os.environ.get("KUBECONFIG", "")) != full.kubeconfig_path():
        print("no node is cut: KUBECONFIG is not that of tools/cluster", file=sys.stderr)
        return
    in_place, recreated = (recoveries_of_nodes(core, strategy, recreations) for strategy in ("InPlace", "Recreate"))
    yield harness.row("a node lost, in place", "s", in_place, recreated)


if __name__ == "__main__":
    harness.main(__doc__, measure, packages=("disttrain", "torch", "kopf"))
