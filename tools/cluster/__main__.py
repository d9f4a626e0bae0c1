"""`python -m tools.cluster COMMAND`: the commands that people and make call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tools.cluster import build, full, image_builds, images, leftovers
from tools.cluster.errors import ClusterError, MissingError
from tools.cluster.processes import ProcessId
from tools.cluster.programs import ASSETS, CLUSTER


def log(text: str) -> None:
    """News go to standard error: standard output holds the one result that scripts read."""
    print(text, file=sys.stderr, flush=True)


def assets() -> None:
    print(build.ensure_assets(log))


def gate() -> None:
    build.ensure(["helm", *ASSETS], log)  # in the order in which tests ask for them


def kwok() -> None:
    print(build.ensure(["kwok"], log)["kwok"])


def up(owner: int | None) -> None:
    print(os.environ.get("KUBECONFIG") or full.up(log, _process(owner)))


def down(owner: int | None) -> None:
    if full.down(_process(owner)):
        check_clean()


def _process(pid: int | None) -> ProcessId | None:
    if pid is None:
        return None
    process = ProcessId.of(pid)
    if not process:
        raise ClusterError(f"--owner {pid}: no such process")
    return process


def check_clean() -> None:
    if left := leftovers.remains():
        raise ClusterError(f"{len(left)} things are left:\n" + "\n".join(f"  {thing}" for thing in left))
    log("nothing is left of the cluster")


def provide_images() -> None:
    images.provide(log)


def prefetch() -> None:
    """Both at once: the programs want the processors, the images the network and the disk."""
    with ThreadPoolExecutor() as pool:
        programs = pool.submit(build.ensure, [*CLUSTER, "kwok"], log)
        pool.submit(image_builds.build_all, log).result()
        programs.result()


def status() -> None:
    for line in full.status():
        print(line)


COMMANDS: dict[str, tuple[str, Callable[[], None]]] = {
    "assets": ("build etcd, kube-apiserver and kubectl; print their folder", assets),
    "gate": ("build what `make test` needs: the assets and helm", gate),
    "kwok": ("build kwok (fake nodes); print its path", kwok),
    "images": ("build both images and give them to the cluster's nodes", provide_images),
    "prefetch": ("build all programs and images, without starting anything", prefetch),
    "status": ("what runs and what does not", status),
    "check-clean": ("list what is left of a cluster on this machine; fails if anything is", check_clean),
}
OWNER_COMMANDS: dict[str, tuple[str, Callable[[int | None], None]]] = {
    "up": ("start a cluster with two nodes, or repair it; print its kubeconfig's path", up),
    "down": ("end the cluster and remove all that belongs to it, but for the cache", down),
}
NODE_COMMANDS: dict[str, tuple[str, Callable[[str], None]]] = {
    "kill-node": ("kill a node as a power cut does: kubelet, containerd, its pods", full.kill_node),
    "start-node": ("bring a killed node back", full.start_node),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description="A real Kubernetes for the tests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, _) in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary)
    for name, (summary, _) in OWNER_COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--owner", type=int, metavar="PID", help="a cluster that `up` starts is this process's")
    for name, (summary, _) in NODE_COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary).add_argument("node")
    arguments = parser.parse_args()
    try:
        if arguments.command in OWNER_COMMANDS:
            OWNER_COMMANDS[arguments.command][1](arguments.owner)
        elif arguments.command in NODE_COMMANDS:
            NODE_COMMANDS[arguments.command][1](arguments.node)
        else:
            COMMANDS[arguments.command][1]()
    except MissingError as missing:
        log(f"tools.cluster: {missing}")
        return 2
    except ClusterError as error:
        log(f"tools.cluster: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
