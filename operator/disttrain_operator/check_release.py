"""Whether an installed release works: every replica that answers is ready, and one of them leads.

    python -m disttrain_operator.check_release HOST PORT

`helm test` runs it in a pod. HOST stands for the addresses of all ready replicas, as a headless Service does.
"""

import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException

from disttrain_api.bounds import cut
from disttrain_api.escape import escaped

# An election that has just begun ends within seconds.
PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 1.0
REQUEST_SECONDS = 5.0
MAX_PAGE = 8 * 1024 * 1024
MAX_LINE = 1000


@dataclass(frozen=True)
class Replica:
    """State that a replica reports."""

    address: str
    ready: bool
    leads: bool
    state: str
    """The last line of its /readyz, or why it did not answer."""


def problem(replicas: Sequence[Replica]) -> str | None:
    """Return what is wrong with the release, as a sentence; None where it works."""
    if not replicas:
        return "no replica is ready"
    states = "; ".join(f"{replica.address} {replica.state}" for replica in replicas)
    if not all(replica.ready for replica in replicas):
        return f"not every replica is ready: {states}"
    leaders = sum(replica.leads for replica in replicas)
    return None if leaders == 1 else f"{leaders} of {len(replicas)} replicas lead, not one: {states}"


def ask(address: str, port: int) -> Replica:
    """Return what the replica at this address says."""
    host = f"[{address}]" if ":" in address else address
    try:
        ready, report = _page(f"http://{host}:{port}/readyz")
        _, metrics = _page(f"http://{host}:{port}/metrics")
    except (OSError, HTTPException) as error:
        return Replica(address, ready=False, leads=False, state=_line(f"does not answer: {error}"))
    leads = "disttrain_leader 1.0" in metrics.splitlines()
    return Replica(address, ready, leads, _line(report.strip().rpartition("\n")[2]))


def _line(text: str) -> str:
    """Return foreign text as one line of printable text."""
    return escaped(cut(text, MAX_LINE))


def _page(url: str) -> tuple[bool, str]:
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_SECONDS) as answer:
            return True, answer.read(MAX_PAGE).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return False, error.read(MAX_PAGE).decode(errors="replace")


def addresses(host: str, port: int) -> list[str]:
    """Return all addresses of a host; none where the name is not known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def check(host: str, port: int, patience: float = PATIENCE_SECONDS) -> str | None:
    """Return what is still wrong with the release after `patience` seconds; None as soon as it works."""
    deadline = time.monotonic() + patience
    while True:
        replicas = [ask(address, port) for address in addresses(host, port)]
        wrong = problem(replicas)
        if wrong is None:
            print(*(f"{replica.address} {replica.state}" for replica in replicas), sep="\n")
            return None
        if time.monotonic() >= deadline:
            return wrong
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    wrong = check(sys.argv[1], int(sys.argv[2]))
    sys.exit(wrong and f"the release does not work: {wrong}")
