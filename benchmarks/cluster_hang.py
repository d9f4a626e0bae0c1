"""How long until a rank that hangs is named in the status of a job of two pods on real nodes, and whether it is right.

    KUBECONFIG=… python benchmarks/cluster_hang.py [--quick] [--json FILE]

The operator must be installed and its images be on the nodes, as for cluster_recovery.py. A rank is stopped (SIGSTOP),
each in turn: from then until the condition HangSuspected of the job is True, as a watch of the API server says. The
reference is three median steps and two seconds. Then the rank goes on (SIGCONT), and the condition is withdrawn. Times
are of this machine, which is also that of the nodes.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kubernetes import client, config, watch

from benchmarks import harness
from benchmarks.cluster_recovery import NAME, PATIENCE_SECONDS, Gang, until
from benchmarks.hang import NAMED, QUICK_NAMED
from benchmarks.local_job import STEP
from benchmarks.recovery import p95
from benchmarks.start_latency import a_namespace, lines_of
from disttrain_api.names import GROUP, PLURAL, VERSION

STEPS_BETWEEN = 200
"""So many that the agent has forgotten how long the one took in which a rank was stopped."""


def measure(quick: bool) -> Iterator[harness.Row]:
    config.load_kube_config()
    core = client.CoreV1Api()
    with a_namespace(core) as namespace:
        began, gang = time.time(), Gang(core, namespace, "InPlace")
        gang.trains(began)
        seconds, right, withdrawn, steps = list[float](), list[bool](), list[bool](), list[float]()
        for number in range(QUICK_NAMED if quick else NAMED):
            reached = newest_step(core, namespace, gang)
            until(lambda seen=reached: newest_step(core, namespace, gang) > seen + STEPS_BETWEEN, "steps are done")
            steps.append(step_seconds(core, namespace, gang))
            victim = number % 2
            stopped = gang.signal_rank(victim, "SIGSTOP")
            named, message = seen_when(namespace, lambda one: one["status"] == "True")
            gang.signal_rank(victim, "SIGCONT")
            seconds.append(named - stopped)
            right.append(message.startswith(f"rank {victim} (pod {gang.pod(victim)} "))
            _, message = seen_when(namespace, lambda one: one["status"] == "False")
            withdrawn.append(bool(message))
        goal = 3 * statistics.median(steps) + 2
        yield harness.row("a stopped rank: named after", "s", seconds, [goal])
        yield harness.Row("a stopped rank: named after, p95", p95(seconds), "s", goal, len(seconds))
        yield harness.Row("the right rank is named", sum(right), "of them", len(right), len(right))
        yield harness.Row("withdrawn once it goes on", sum(withdrawn), "of them", len(withdrawn), len(withdrawn))
        yield harness.row("a step takes", "s", steps)


def seen_when(namespace: str, condition: Callable[[dict[str, Any]], bool]) -> tuple[float, str]:
    """Return when HangSuspected of the job was seen to be so, and its message."""
    jobs = client.CustomObjectsApi()
    changes = watch.Watch().stream(
        jobs.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL, timeout_seconds=PATIENCE_SECONDS
    )
    for change in changes:
        for one in change["object"].get("status", {}).get("conditions", []):
            if one["type"] == "HangSuspected" and condition(one):
                return time.time(), str(one["message"])
    raise TimeoutError(f"no change of HangSuspected of {NAME} within {PATIENCE_SECONDS} s")


def logged(core: client.CoreV1Api, namespace: str, gang: Gang) -> list[tuple[float, int]]:
    """Times and numbers of the last logged steps of rank 0."""
    lines = lines_of(core, namespace, gang.pod(0), seconds=30)
    return [(stamp, int(found[1])) for stamp, line in lines if (found := STEP.search(line)) is not None]


def newest_step(core: client.CoreV1Api, namespace: str, gang: Gang) -> int:
    return max((step for _, step in logged(core, namespace, gang)), default=0)


def step_seconds(core: client.CoreV1Api, namespace: str, gang: Gang) -> float:
    """The median of what a step takes, by the lines of the log."""
    found = logged(core, namespace, gang)
    return statistics.median((now - then) / (step - before) for (then, before), (now, step) in pairwise(found))


if __name__ == "__main__":
    harness.main(__doc__, measure, packages=("disttrain", "torch", "kopf"))
