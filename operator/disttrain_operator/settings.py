"""Flags and environment -> one frozen Settings. Every flag has a variable DISTTRAIN_<FLAG>; the chart sets flags."""

import argparse
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_operator.kube.client import REQUEST_SECONDS
from disttrain_operator.kube.watch import SILENCE_SECONDS
from disttrain_operator.plan.site import PodDefaults
from disttrain_operator.plan.template_defaults import TemplateDefaults, read_template_defaults

MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 2, 120
DEFAULT_IMAGE = "disttrain/trainer:0.1.0"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


class AgentAccess(StrEnum):
    """How agents are asked."""

    AUTO = "Auto"
    POD_IP = "PodIP"
    API_SERVER = "ApiServer"


def _number(kind: type[int] | type[float], expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not fits(number):
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text[:64]!r}")
        return number

    return read


_COUNT = _number(int, "a whole number of at least 1", lambda number: number >= 1)
_FROM_0 = _number(int, "a whole number of at least 0", lambda number: number >= 0)
_MORE_THAN_0 = _number(float, "a number of more than 0", lambda number: number > 0)
_PORT = _number(int, "a whole number from 0 to 65535", lambda number: 0 <= number <= 65535)
_LEASE = _number(
    int,
    f"a whole number from {MIN_LEASE_SECONDS} to {MAX_LEASE_SECONDS}",
    lambda number: MIN_LEASE_SECONDS <= number <= MAX_LEASE_SECONDS,
)
_HISTORY = _number(int, "a whole number from 0 to 1000", lambda number: 0 <= number <= 1000)
_INTERVAL = _number(float, "a number of at least 0", lambda number: number >= 0)


def _user(text: str) -> int | None:
    """A user's number; None where it is left to the cluster."""
    if not text.strip():
        return None
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 2147483647, or empty, not {text[:64]!r}")
    return int(text)


def _template_defaults(path: str) -> TemplateDefaults:
    """Return the template defaults of a file; none if no file is named."""
    if not path:
        return {}
    try:
        return read_template_defaults(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _name(text: str) -> str:
    """A name of an object, which stays one part of a path."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is no name: lower case letters, digits, dashes and dots")
    return text


def _names(text: str) -> tuple[str, ...]:
    """Names that are separated by commas, each once, in the order of the alphabet."""
    return tuple(sorted({_name(name.strip()) for name in text.split(",") if name.strip()}))


def _some_names(text: str) -> tuple[str, ...]:
    if not _names(text):
        raise argparse.ArgumentTypeError(f"must name a namespace, not {text[:64]!r}")
    return _names(text)


def _or_none(text: str) -> str | None:
    return text or None


def _name_or_none(text: str) -> str | None:
    return _name(text) if text else None


def _secret(text: str) -> str | None:
    parts = text.split("/")
    if text and (len(parts) != 2 or not all(map(_NAME.fullmatch, parts))):
        raise argparse.ArgumentTypeError(f"must be namespace/name, not {text!r}")
    return text or None


def _level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"must be DEBUG, INFO, WARNING or ERROR, not {text!r}")
    return text.upper()


def _agent_access(text: str) -> AgentAccess:
    try:
        return AgentAccess(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(AgentAccess)}, not {text[:64]!r}") from None


def _own_namespace() -> tuple[str, ...]:
    """The namespace of the pod that this runs in."""
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return (file.read_text().strip() if file.is_file() else "default",)


class Flag(NamedTuple):
    """A flag of the command line, and with it a variable."""

    help: str
    read: Callable[[str], object] | None = str
    """From the word that was given; None: the flag is a switch."""
    name: str = ""
    """Empty: as the field."""


def _flag(help_: str, default: Any, read: Callable[[str], object] | None = str, name: str = "") -> Any:
    metadata = {"flag": Flag(help_, read, name)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _switch(help_: str) -> Any:
    return _flag(help_, False, None)


_POD_FLAGS = {
    "image_pull_policy": Flag("imagePullPolicy of pods whose template has none", _or_none),
    "shm_size_limit": Flag("size limit of /dev/shm (default: limited by the pod's memory limit)", _or_none),
    "user_id": Flag("user and group of restricted pods; empty: the cluster's choice", _user),
    "grace_seconds": Flag("terminationGracePeriodSeconds of pods whose template has none", _FROM_0),
    "template": Flag("YAML file with defaults for the pods of all jobs", _template_defaults, "pod-defaults-file"),
    "node_lost_seconds": Flag("seconds until pods on a lost node are given up", _FROM_0),
}


@dataclass(frozen=True)
class Settings:
    """The settings of this process: each field with its flag, in the order of `--help`."""

    namespaces: tuple[str, ...] = _flag(
        "serve these namespaces only, separated by commas (default: all)", (), _names, "namespace"
    )
    trainer_image: str = _flag("image of the container `trainer` if the template names none", DEFAULT_IMAGE)
    token_key_file: Path | None = _flag(  # noqa: RUF009 - as all the others
        "file with the key from which jobs' tokens are derived (default: a random key)", None, Path
    )
    token_key_secret: str | None = _flag(
        "namespace/name of a Secret with that key under `key`; created if it does not exist", None, _secret
    )
    kubeconfig: str | None = _flag(
        "kubeconfig file (default: those of KUBECONFIG, else the pod's service account, else ~/.kube/config)",
        None,
        _or_none,
    )
    context: str | None = _flag("context of the kubeconfig (default: its current one)", None, _or_none)
    health_address: str = _flag("address of /healthz and /readyz (default: all, of IPv4 and IPv6)", "")
    health_port: int = _flag("port of /healthz and /readyz; 0: any free one", 8080, _PORT)
    max_in_flight: int = _flag("concurrent requests to the API server", 64, _COUNT)
    request_timeout_seconds: float = _flag("time-out of requests to the API server", REQUEST_SECONDS, _MORE_THAN_0)
    watch_silence_seconds: float = _flag(
        "a watch without events for so long is reopened; API servers send something every 60 s",
        SILENCE_SECONDS,
        _MORE_THAN_0,
    )
    workers: int = _flag(
        "jobs that are processed concurrently; at most a quarter of them from one namespace", 64, _COUNT
    )
    lease_namespaces: tuple[str, ...] = _flag(
        "namespaces of the leases, separated by commas: one lease in each; the operator acts while it holds all",
        _own_namespace,
        _some_names,
        "lease-namespace",
    )
    lease_name: str = _flag(
        "name of the lease: one for all operators that serve the same jobs", "disttrain-operator", _name
    )
    lease_duration_seconds: int = _flag(
        "how long a lease is valid without renewal; its holder renews it four times as often",
        2,
        _LEASE,
    )
    cluster_lease_namespace: str | None = _flag(
        "with --namespace: stand by while an operator for all namespaces holds a lease here", None, _name_or_none
    )
    release: str = _flag("namespace/name of this release, for the identity in the lease", "")
    replica_name: str = _flag("name of this replica in the lease", socket.gethostname)
    pods: PodDefaults = field(default_factory=PodDefaults, metadata={"flags": _POD_FLAGS})
    gate_hold_seconds: int = _flag("longest time for which waiting gangs reserve nodes at a stretch", 4 * 3600, _COUNT)
    progress_interval_seconds: float = _flag(
        "shortest time between two progress requests to a running job; 0: never ask", 10.0, _INTERVAL
    )
    progress_per_second: float = _flag("progress requests per second at most, over all jobs", 100.0, _MORE_THAN_0)
    agent_access: AgentAccess = _flag(  # noqa: RUF009 - as all the others
        "how jobs are asked for progress: PodIP, at their pods' addresses; ApiServer, through its proxy; Auto: PodIP "
        "with a pod's service account, ApiServer with a kubeconfig",
        AgentAccess.AUTO,
        _agent_access,
    )
    history_jobs: int = _flag(
        "finished jobs of a namespace that its ConfigMap disttrain-history keeps the end of; 0: none", 100, _HISTORY
    )
    log_level: str = _flag("DEBUG, INFO, WARNING or ERROR", "INFO", _level)
    json_logs: bool = _switch("one JSON object per line")
    leader_elect: bool = _switch("act only while holding a lease: for several replicas")
    gang_gate: bool = _switch("serve jobs with gangScheduler Gate: watches all nodes and pods of the cluster")
    network_policies: bool = _switch("create a NetworkPolicy per job: only its own pods may reach its pods")


_DESCRIPTION = "The operator of DistTrainingJobs. Each flag also has an environment variable DISTTRAIN_<FLAG>."


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the command line; exits with a sentence where it is wrong."""
    parser = argparse.ArgumentParser(prog="disttrain-operator", description=_DESCRIPTION)
    defaults = Settings()
    for each in fields(Settings):
        if "flag" in each.metadata:
            _add(parser, each.metadata["flag"], each.name, getattr(defaults, each.name), environment)
        for name, flag in each.metadata.get("flags", {}).items():
            _add(parser, flag, name, getattr(defaults.pods, name), environment)
    given = vars(parser.parse_args(arguments))
    settings = Settings(pods=PodDefaults(**{name: given.pop(name) for name in _POD_FLAGS}), **given)
    if settings.gang_gate and settings.namespaces:
        parser.error("--gang-gate needs an operator that serves all namespaces: leave --namespace out, or --gang-gate")
    if settings.token_key_secret and settings.token_key_file:
        parser.error("--token-key-file and --token-key-secret both name the key: give only one")
    return settings


def _add(
    parser: argparse.ArgumentParser, flag: Flag, field_: str, default: Any, environment: Mapping[str, str]
) -> None:
    name = flag.name or field_.replace("_", "-")
    found = environment.get("DISTTRAIN_" + name.upper().replace("-", "_"))
    if flag.read is None:
        on = (found or "").lower() in ("1", "true", "yes")
        parser.add_argument(f"--{name}", dest=field_, action="store_true", default=on, help=flag.help)
        return
    shown = ",".join(default) if isinstance(default, tuple) else default
    help_ = f"{flag.help} (default: {shown})" if shown else flag.help
    metavar = name.upper().replace("-", "_")
    parser.add_argument(f"--{name}", dest=field_, metavar=metavar, type=flag.read, default=found or default, help=help_)
