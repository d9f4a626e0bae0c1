"""kubectl as the tests use it: every claim is read the way a user would read it."""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.cluster.processes import dying_with_parent

PATIENCE = 600
"""Seconds that a condition may take on a slow machine before the test gives up."""
PAUSE = 1.0
"""Seconds between two looks: each starts a kubectl, many a program in a pod, on processors that the pods need."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl against one cluster and namespace."""

    program: Path
    kubeconfig: Path
    namespace: str

    def run(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """The finished command, whatever its exit code."""
        command, environment = self._command(arguments), self._environment()
        return subprocess.run(
            command, check=False, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The command, running, with its standard output as a pipe."""
        command = dying_with_parent(self._command(arguments))
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._environment()
        )

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [str(self.program), "--namespace", self.namespace, *arguments]

    def _environment(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.kubeconfig)}

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Standard output of a command that must succeed."""
        done = self.run(*arguments, stdin=stdin, timeout=timeout)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, manifest: dict[str, Any]) -> None:
        self("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def get(self, *arguments: str) -> Any:
        return json.loads(self("get", *arguments, "-o", "json"))

    def status(self, job: str) -> dict[str, Any]:
        """Status of a job; empty before the operator's first write."""
        found: dict[str, Any] = self.get("dtj", job).get("status") or {}
        return found

    def condition(self, job: str, type_: str) -> dict[str, str]:
        """A condition of a job; empty before the operator's first write."""
        conditions = self.status(job).get("conditions") or []
        return next((entry for entry in conditions if entry["type"] == type_), {})

    def pods(self, job: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("pods", "-l", f"disttrain.io/job-name={job}")["items"]
        return found

    def wait(self, condition: str, job: str, *, patience: float = PATIENCE) -> None:
        """`kubectl wait`, as the README tells users to."""
        self._wait(f"condition={condition}", job, patience)

    def wait_for(self, path: str, job: str, *, patience: float = PATIENCE) -> None:
        """Wait until a JSON path into the job finds something; `{.path}=value`: until that is there."""
        self._wait(f"jsonpath={path}", job, patience)

    def _wait(self, what: str, job: str, patience: float) -> None:
        waited = self.run("wait", f"--for={what}", f"dtj/{job}", f"--timeout={patience}s", timeout=patience + 30)
        assert waited.returncode == 0, f"{waited.stderr}\n{self.describe_job(job)}"

    def wait_for_log(self, pod: str, pattern: str, *, job: str, patience: float = PATIENCE) -> re.Match[str]:
        """Wait until a line of the trainer's log matches; the match."""
        deadline = time.monotonic() + patience
        while (left := deadline - time.monotonic()) > 0:
            with self.start("logs", "--follow", pod, "-c", "trainer") as process:
                assert process.stdout is not None
                end = threading.Timer(left, process.kill)
                end.start()
                try:
                    for line in process.stdout:
                        if found := re.search(pattern, line):
                            return found
                finally:
                    end.cancel()
                    process.kill()
            # Its container does not run yet.
            time.sleep(PAUSE)
        raise AssertionError(f"{pod} has not said {pattern!r} in {patience} s\n{self.describe_job(job)}")

    def until(self, claim: Callable[[], Any], what: str, *, job: str = "", patience: float = PATIENCE) -> Any:
        """Wait until the claim holds and return what it returned."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            answer = claim()
            if answer:
                return answer
            time.sleep(PAUSE)
        raise AssertionError(f"still not after {patience} s: {what}\n{self.describe_job(job) if job else ''}")

    def describe_job(self, job: str) -> str:
        """Everything that helps to see why a job is where it is."""
        parts = [
            # First, as reports of failed tests are cut.
            self.run("get", "dtj", job, "-o", "jsonpath={.status}").stdout,
            self.run("get", "pods", "-o", "wide").stdout,
            self.run("get", "events", "--sort-by=.lastTimestamp").stdout[-4000:],
            self.run("logs", "-l", f"disttrain.io/job-name={job}", "--tail=40", "--prefix").stdout,
            self.run("get", "dtj", job, "-o", "jsonpath={.spec}").stdout,
        ]
        return "\n".join(parts)
