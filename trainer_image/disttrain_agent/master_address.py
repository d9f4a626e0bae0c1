"""Where worker 0 is when the first ranks of a pod start: at its name, or before that has an address, where the operator
says.

Pods that start together look the name up before it has an address, and cluster DNS remembers for 5 s to 30 s that it
was missing. The operator knows the address of a pod as soon as that runs.
"""

import asyncio
from collections.abc import Callable

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.resolve import LIMIT_SECONDS, wait_for_address
from disttrain_api.names import ExitCode


class MasterAddress:
    """The address of worker 0 for the first ranks of a pod. own_name: seconds that worker 0 waits for its own name."""

    def __init__(self, pod: PodEnvironment, own_name: float, log: Callable[[str], None]) -> None:
        self._pod, self._log = pod, log
        self._limit = own_name if pod.is_master else LIMIT_SECONDS
        self._heard = asyncio.Event()
        self._waiting = False
        self.heard: str | None = None
        """Where the operator has said that worker 0 is; None: its name had an address first."""

    def hear(self, address: str, proof: str, replacement: int) -> bool:
        """Somebody says where worker 0 is. Return whether that was waited for, and is proved: ranks prove nothing to
        each other where they meet."""
        if not self._waiting or not self._pod.proves(proof, address, replacement):
            return False
        self._log(f"worker 0 is at {address}, whose name has no address yet")
        self.heard, self._waiting = address, False
        self._heard.set()
        return True

    async def known(self, ends: asyncio.Event) -> bool:
        """Wait until worker 0 has an address, its time is over, or `ends` is set; return whether it has one."""
        self._waiting = True
        looked_up = asyncio.create_task(wait_for_address(self._pod.master_address, self._log, limit=self._limit))
        tasks = {looked_up, asyncio.create_task(self._heard.wait()), asyncio.create_task(ends.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting = False
            for task in tasks:
                task.cancel()
        return self.heard is not None or (looked_up.done() and looked_up.result())

    def why_unknown(self) -> tuple[ExitCode, str]:
        """Return as what, and why, a pod ends whose wait was in vain."""
        code, why = ExitCode.PEER_LOST, "worker 0 or the cluster's DNS cannot be reached"
        if self._pod.is_master:
            code = ExitCode.NETWORK_FAULTY
            why = (
                "it is this pod's own name: the cluster's DNS cannot be reached from here, or the job's Service is gone"
            )
        return code, f"{self._pod.master_address} has no address: {why}"
