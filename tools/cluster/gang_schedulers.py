"""Schedulers that place gangs, beside a control plane: scheduler-plugins' coscheduling, and Volcano."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tools.cluster.api import wait_for
from tools.cluster.build import path_of, sources_of
from tools.cluster.control_plane import ControlPlane
from tools.cluster.processes import Daemon, ProcessId

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class GangScheduler:
    """Installs its kinds, then runs its programs until the block ends."""

    def __init__(self, control_plane: ControlPlane, name: str) -> None:
        self.api, self.kubeconfig = control_plane.api, control_plane.kubeconfig
        self.folder = control_plane.folder / name
        self.folder.mkdir()
        self._daemons: list[Daemon] = []

    def add(self, program: str, arguments: Sequence[str | Path]) -> None:
        owner = ProcessId.of(os.getpid())
        self._daemons.append(Daemon(program, [path_of(program), *arguments], self.folder, owner=owner))

    def install(self, definitions: Sequence[Path], group_version: str, kinds: set[str]) -> None:
        """Returns when the kinds are served."""
        for path in definitions:
            for definition in yaml.safe_load_all(path.read_text()):
                self.api.ensure(CRDS, definition)

        def served() -> bool:
            answer = self.api.ask("GET", f"/apis/{group_version}")
            return answer.status == 200 and kinds <= {kind["name"] for kind in answer.json()["resources"]}

        wait_for(served, 60, lambda: f"{kinds} of {group_version} are not served")

    def __enter__(self) -> GangScheduler:
        for daemon in self._daemons:
            daemon.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in self._daemons:
            daemon.kill()

    def end_messages(self) -> list[str]:
        """What the programs that no longer run have left."""
        return [daemon.end_message() for daemon in self._daemons if not daemon.running()]


def coscheduling(control_plane: ControlPlane) -> GangScheduler:
    """The scheduler of scheduler-plugins, as a second one under its usual name."""
    scheduler = GangScheduler(control_plane, "coscheduling")
    definitions = sources_of("coscheduling") / "config/crd/bases"
    scheduler.install(
        [definitions / "scheduling.x-k8s.io_podgroups.yaml"], "scheduling.x-k8s.io/v1alpha1", {"podgroups"}
    )
    config: dict[str, Any] = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(scheduler.kubeconfig)},
        "profiles": [
            {
                "schedulerName": "scheduler-plugins-scheduler",
                "plugins": {
                    "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
                    "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
                },
                "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
            }
        ],
    }
    path = scheduler.folder / "config.json"
    path.write_text(json.dumps(config))
    to_api = [f"--{word}-kubeconfig={scheduler.kubeconfig}" for word in ("authentication", "authorization")]
    scheduler.add("coscheduling", [f"--config={path}", *to_api, "--secure-port=0"])
    return scheduler


def volcano(control_plane: ControlPlane) -> GangScheduler:
    """Volcano's scheduler and controllers, with the queue `default`."""
    scheduler = GangScheduler(control_plane, "volcano")
    bases = sorted((sources_of("volcano") / "config/crd").glob("*/bases/*.yaml"))
    scheduler.install(bases, "scheduling.volcano.sh/v1beta1", {"podgroups", "queues"})
    config = {
        "actions": "enqueue, allocate, backfill",
        "tiers": [
            {"plugins": [{"name": "priority"}, {"name": "gang"}]},
            {"plugins": [{"name": "predicates"}, {"name": "proportion"}, {"name": "nodeorder"}]},
        ],
    }
    path = scheduler.folder / "scheduler.yaml"
    path.write_text(yaml.safe_dump(config))
    common = [f"--kubeconfig={scheduler.kubeconfig}", "--leader-elect=false", "--enable-healthz=false"]
    scheduler.add("volcano-controllers", common)
    scheduler.add("volcano", [*common, f"--scheduler-conf={path}", "--enable-metrics=false"])
    return scheduler
