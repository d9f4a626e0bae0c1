"""Two tenants and two replicas of the operator, of which the leader is killed now and then."""

import itertools
import re
from pathlib import Path
from typing import Any

from tests.integration.operator_process import OperatorProcess, Team, eventually
from tools.cluster.api import ApiClient
from tools.cluster.control_plane import ControlPlane

GATE = {"schedulingPolicy": {"gangScheduler": "Gate"}, "cleanPodPolicy": "All"}
MOST_BYTES = 512 << 20
"""The chart's limit on the operator's memory."""


class Pair:
    """Two replicas with the gate on."""

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self.operators = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            flags = ("--leader-elect", f"--replica-name={name}", "--gang-gate", "--lease-namespace=default")
            self.operators.append(OperatorProcess(control_plane, folder / name, *flags))

    def kill_the_leader(self) -> None:
        """SIGKILL, once one leads; it is started again at once."""
        leader = eventually(self._leader, self.logs)
        leader.kill()
        leader.start(wait=False)

    def _leader(self) -> OperatorProcess | None:
        for operator in self.operators:
            if operator.health("readyz") and "disttrain_leader 1.0" in operator.page("metrics"):
                return operator
        return None

    def logs(self) -> str:
        return "\n".join(operator.log()[-3000:] for operator in self.operators)


def tracebacks(operator: OperatorProcess) -> list[str]:
    """Every different error that nobody foresaw, with the line before it."""
    parts = re.findall(r"^(.*)\nTraceback .*\n((?:[ \t].*\n)+)(\S.*)$", operator.log(), re.MULTILINE)
    return sorted({f"{before[-200:]} ... {frames[-400:]} {error[:300]}" for before, frames, error in parts})


def peak_bytes(operator: OperatorProcess) -> int:
    """The most memory that the process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{operator.process.pid}/status").read_text())
    return int(found[1]) << 10


class Good:
    """The other tenant: gangs of two pods, one after the other."""

    def __init__(self, api: ApiClient) -> None:
        self.team = Team(api, "good")
        self._numbers = itertools.count()
        self.names: list[str] = []

    def launch(self, count: int) -> None:
        for _ in range(count):
            name = f"good-{next(self._numbers)}"
            self.team.create(name, runPolicy=GATE)
            self.names.append(name)

    def all_run(self, why: Any) -> None:
        def running() -> bool:
            return all(self.team.condition("Running", name)["status"] == "True" for name in self.names)

        eventually(running, lambda: [self._story(), why()], pause=0.2)

    def all_end_well(self) -> None:
        """Let their pods end. No attempt was lost on the way."""
        self.team.finish([pod for pod in self.team.pods(1) if "deletionTimestamp" not in pod["metadata"]])
        for name in self.names:
            self.team.wait_for("Complete", name=name)
            status = self.team.status(name)
            assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 1, 0), status

    def _story(self) -> object:
        return {name: self.team.condition("Running", name) for name in self.names}
