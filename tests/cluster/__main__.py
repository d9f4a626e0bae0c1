"""`python -m tests.cluster COMMAND`: the commands that people and make call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from tests.cluster import build
from tests.cluster.errors import ClusterError, MissingError


def say(text: str) -> None:
    """News go to standard error: standard output holds the one result that scripts read."""
    print(text, file=sys.stderr, flush=True)


def assets(_: argparse.Namespace) -> None:
    print(build.ensure_assets(say))


COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], None]]] = {
    "assets": ("build etcd, kube-apiserver and kubectl; print their folder", assets),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A real Kubernetes for the tests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, _) in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary)
    arguments = parser.parse_args()
    try:
        COMMANDS[arguments.command][1](arguments)
    except MissingError as missing:
        say(f"tests.cluster: {missing}")
        return 2
    except ClusterError as error:
        say(f"tests.cluster: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
