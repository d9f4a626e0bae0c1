"""The machine's network as the cluster needs it: an interface for each node's address, and forwarding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.cluster.shell import run, succeeds

DNS_SERVICE = "10.96.0.10"
POD_ADDRESSES = "10.244.0.0/16"

_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_REMEMBERED = "ip_forward.before"


def add_link(name: str, address: str) -> None:
    """A bridge without ports: a link type that every kernel has, where `dummy` may be missing."""
    if not link_exists(name):
        run(["ip", "link", "add", name, "type", "bridge"])
    run(["ip", "address", "replace", f"{address}/24", "dev", name])
    run(["ip", "link", "set", name, "up"])


def link_exists(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def remove_links(names: Iterable[str]) -> None:
    """A pod's interface may go by itself meanwhile: the kernel clears the namespace of an ended pod in its own time."""
    for name in names:
        if link_exists(name) and not succeeds(["ip", "link", "delete", name]) and link_exists(name):
            run(["ip", "link", "delete", name])


def plugged_into(bridges: Iterable[str]) -> Sequence[str]:
    """The interfaces (the hosts' ends of pods) that hang on these bridges."""
    links = json.loads(run(["ip", "-json", "link", "show"]) or "[]")
    return [link["ifname"] for link in links if link.get("master") in set(bridges)]


def forward(state: Path) -> None:
    """Lets packets pass between the pods of two nodes; remembers how it was before."""
    remembered = state / _REMEMBERED
    if not remembered.exists():
        remembered.write_text(_FORWARDING.read_text())
    _FORWARDING.write_text("1")


def forward_as_before(state: Path) -> None:
    remembered = state / _REMEMBERED
    if remembered.exists():
        _FORWARDING.write_text(remembered.read_text())


# --- packet filter ---

_OWN_CHAINS = ("KUBE-", "CNI-")


def our_chains(saved: str) -> Sequence[str]:
    """`table/chain` for each chain of Kubernetes and CNI in what iptables-save printed."""
    return [f"{table}/{chain}" for table, chain, _ in _lines(saved) if chain.startswith(_OWN_CHAINS) and _ is None]


def removal(saved: str) -> str:
    """What iptables-restore --noflush has to be told so that those chains, and the rules that lead there, are gone."""
    tables: dict[str, tuple[list[str], list[str]]] = {}
    for table, chain, rule in _lines(saved):
        leading, chains = tables.setdefault(table, ([], []))
        if rule is None and chain.startswith(_OWN_CHAINS):
            chains.append(chain)
        elif rule is not None and not chain.startswith(_OWN_CHAINS) and _leads_to_own(rule):
            leading.append(rule.replace("-A", "-D", 1))
    parts = []
    for table, (leading, chains) in tables.items():
        if chains:
            emptied = [f":{chain} - [0:0]" for chain in chains]
            parts += [f"*{table}", *emptied, *leading, *(f"-X {chain}" for chain in chains), "COMMIT", ""]
    return "\n".join(parts)


def _leads_to_own(rule: str) -> bool:
    _, jump, target = rule.rpartition(" -j ")
    return bool(jump) and target.startswith(_OWN_CHAINS)


def _lines(saved: str) -> Iterable[tuple[str, str, str | None]]:
    """(table, chain, None) for each chain that is declared and (table, chain, rule) for each rule."""
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":"):
            yield table, line[1:].split()[0], None
        elif line.startswith("-A "):
            yield table, line.split()[1], line


FAMILIES = ("iptables", "ip6tables")


def filters_left() -> Sequence[str]:
    return [f"{family} chain {chain}" for family in FAMILIES for chain in our_chains(_saved(family))]


def remove_filters() -> None:
    for family in FAMILIES:
        if commands := removal(_saved(family)):
            run([f"{family}-restore", "--noflush"], text_in=commands + "\n")


def _saved(family: str) -> str:
    """Nothing where the kernel lacks the family: then nobody has rules in it."""
    command = [f"{family}-save"]
    return run(command) if succeeds(command) else ""
