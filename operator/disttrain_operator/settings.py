"""Flags and environment -> one frozen Settings. Every flag has a variable DISTTRAIN_<FLAG>; the chart sets flags."""

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disttrain_operator.kube.client import REQUEST_SECONDS
from disttrain_operator.kube.watch import SILENCE_SECONDS
from disttrain_operator.plan.site import PodDefaults
from disttrain_operator.plan.template_defaults import TemplateDefaults, read_template_defaults

MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 2, 120
DEFAULT_IMAGE = "disttrain/trainer:0.1.0"


@dataclass(frozen=True)
class Settings:
    """The settings of this process, from its command line and environment."""

    namespaces: tuple[str, ...] = ()
    """The namespaces to serve; none: all."""
    trainer_image: str = DEFAULT_IMAGE
    token_key_file: Path | None = None
    token_key_secret: str | None = None
    """"namespace/name" of the Secret that holds the key of the jobs' tokens, and is made where there is none."""
    kubeconfig: str | None = None
    context: str | None = None
    health_address: str = ""
    """Empty: all addresses of this machine, of IPv4 and IPv6."""
    health_port: int = 8080
    max_in_flight: int = 64
    request_timeout_seconds: float = REQUEST_SECONDS
    watch_silence_seconds: float = SILENCE_SECONDS
    workers: int = 64
    """Jobs that are looked at side by side; of one namespace a quarter of them."""
    leader_elect: bool = False
    """Whether this is one of several replicas."""
    lease_namespaces: tuple[str, ...] = ("default",)
    """Where the leases are that this replica must hold, all of them, to act."""
    lease_name: str = "disttrain-operator"
    lease_duration_seconds: int = 2
    """How long a replica that has died leads on, about; longer while the API server is slow."""
    cluster_lease_namespace: str | None = None
    """Where operators of all namespaces have their lease: one of single namespaces stands by while it is held."""
    release: str = ""
    """"namespace/name" of the Helm release, for the identity in the lease."""
    replica_name: str = field(default_factory=socket.gethostname)
    pods: PodDefaults = field(default_factory=PodDefaults)
    gang_gate: bool = False
    """Whether jobs may ask for `gangScheduler: Gate`, for which all nodes and pods of the cluster are watched."""
    network_policies: bool = False
    """Whether each job gets a NetworkPolicy that lets only its own pods reach its pods."""
    gate_hold_seconds: int = 4 * 3600
    """For how long gangs that wait at the gate keep nodes from others at a stretch, at most."""
    progress_interval_seconds: float = 10.0
    """How often the agent of a job that runs is asked at most; 0: never."""
    progress_per_second: float = 50.0
    """How many agents are asked in a second at most."""
    log_level: str = "INFO"
    json_logs: bool = False


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the command line; exits with a sentence where it is wrong."""
    defaults, pods = Settings(), PodDefaults()
    parser = argparse.ArgumentParser(prog="disttrain-operator", description=__doc__)

    def flag(name: str, help_: str, default: object = None, type_: Callable[[str], object] = str) -> None:
        value = environment.get("DISTTRAIN_" + name.upper().replace("-", "_")) or default
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(f"--{name}", default=value, type=type_, help=help_ + shown)

    flag("namespace", "serve these namespaces only, separated by commas (default: all)")
    flag("trainer-image", "image of pods whose template names none", defaults.trainer_image)
    flag("token-key-file", "file with the key that jobs' tokens are made with (default: a random key)", type_=Path)
    flag("token-key-secret", "namespace/name of a Secret with that key under `key`; it is made where there is none")
    flag("kubeconfig", "kubeconfig file (default: the pod's service account, else KUBECONFIG)")
    flag("context", "context of the kubeconfig (default: its current one)")
    flag("health-address", "address of /healthz and /readyz (default: all, of IPv4 and IPv6)")
    flag("health-port", "port of /healthz and /readyz; 0: any free one", defaults.health_port, int)
    flag("max-in-flight", "requests to the API server at one time", defaults.max_in_flight, int)
    flag(
        "request-timeout-seconds",
        "how long an answer of the API server is waited for",
        defaults.request_timeout_seconds,
        float,
    )
    flag(
        "watch-silence-seconds",
        "a watch that says nothing for so long is opened again; API servers say something every 60 s",
        defaults.watch_silence_seconds,
        float,
    )
    flag("workers", "jobs that are looked at side by side; of one namespace a quarter of them", defaults.workers, int)
    flag(
        "lease-namespace",
        "namespaces of the leases, separated by commas: there is one in each",
        _own_namespace(),
    )
    flag("lease-name", "name of the lease: one for all operators that serve the same jobs", defaults.lease_name)
    flag(
        "lease-duration-seconds",
        "how long a lease that nobody renews stays its holder's, who renews it four times as often",
        defaults.lease_duration_seconds,
        int,
    )
    flag(
        "cluster-lease-namespace",
        "with --namespace: stand by while an operator of all namespaces leads by a lease here",
    )
    flag("release", "namespace/name of this release, for the identity in the lease")
    flag("replica-name", "name of this replica in the lease", defaults.replica_name)
    flag("image-pull-policy", "imagePullPolicy of pods whose template has none")
    flag("shm-size-limit", "size limit of /dev/shm (default: what the pod's memory limit leaves)")
    flag("user-id", "user and group of restricted pods; empty: the cluster's choice", pods.user_id, _user)
    flag("grace-seconds", "terminationGracePeriodSeconds of pods whose template has none", pods.grace_seconds, int)
    flag("pod-defaults-file", "YAML file with what pods of jobs get besides their templates", type_=_template_defaults)
    flag("node-lost-seconds", "how long a pod stays on a node that is lost", pods.node_lost_seconds, int)
    flag(
        "gate-hold-seconds",
        "for how long gangs that wait at the gate keep nodes from others at a stretch, at most",
        defaults.gate_hold_seconds,
        int,
    )
    flag(
        "progress-interval-seconds",
        "how often a job that runs is asked for its progress at most; 0: never",
        defaults.progress_interval_seconds,
        float,
    )
    flag(
        "progress-per-second",
        "jobs that are asked for their progress in a second at most",
        defaults.progress_per_second,
        float,
    )
    flag("log-level", "DEBUG, INFO, WARNING or ERROR", defaults.log_level)
    for name, help_ in (
        ("json-logs", "one JSON object per line"),
        ("leader-elect", "act only while holding a lease: for several replicas"),
        ("gang-gate", "serve jobs with gangScheduler Gate: watches all nodes and pods of the cluster"),
        ("network-policies", "make a NetworkPolicy per job: its pods are reached by its own pods alone"),
    ):
        given_there = environment.get("DISTTRAIN_" + name.upper().replace("-", "_"), "").lower() in ("1", "true", "yes")
        parser.add_argument(f"--{name}", action="store_true", default=given_there, help=help_)
    given = parser.parse_args(arguments)
    if given.log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log-level must be DEBUG, INFO, WARNING or ERROR, not {given.log_level!r}")
    if given.gang_gate and given.namespace:
        parser.error("--gang-gate needs an operator that serves all namespaces: leave --namespace out, or --gang-gate")
    if given.token_key_secret:
        if given.token_key_file:
            parser.error("--token-key-file and --token-key-secret both say where the key is: leave one out")
        if [bool(part) for part in given.token_key_secret.split("/")] != [True, True]:
            parser.error(f"--token-key-secret must be namespace/name, not {given.token_key_secret!r}")
    if not _names(given.lease_namespace):
        parser.error("--lease-namespace must name a namespace")
    if not MIN_LEASE_SECONDS <= given.lease_duration_seconds <= MAX_LEASE_SECONDS:
        parser.error(f"--lease-duration-seconds must be from {MIN_LEASE_SECONDS} to {MAX_LEASE_SECONDS}")
    for name in ("max_in_flight", "workers", "gate_hold_seconds"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not given.progress_interval_seconds >= 0:
        parser.error("--progress-interval-seconds must be at least 0")
    for name in ("request_timeout_seconds", "watch_silence_seconds", "progress_per_second"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    return Settings(
        namespaces=_names(given.namespace),
        trainer_image=given.trainer_image,
        token_key_file=given.token_key_file,
        token_key_secret=given.token_key_secret or None,
        kubeconfig=given.kubeconfig,
        context=given.context,
        health_address=given.health_address or "",
        health_port=given.health_port,
        max_in_flight=given.max_in_flight,
        request_timeout_seconds=given.request_timeout_seconds,
        watch_silence_seconds=given.watch_silence_seconds,
        workers=given.workers,
        leader_elect=given.leader_elect,
        lease_namespaces=_names(given.lease_namespace),
        lease_name=given.lease_name,
        lease_duration_seconds=given.lease_duration_seconds,
        cluster_lease_namespace=given.cluster_lease_namespace or None,
        release=given.release or "",
        replica_name=given.replica_name,
        pods=PodDefaults(
            image_pull_policy=given.image_pull_policy or None,
            shm_size_limit=given.shm_size_limit or None,
            user_id=given.user_id,
            grace_seconds=given.grace_seconds,
            node_lost_seconds=given.node_lost_seconds,
            template=given.pod_defaults_file or {},
        ),
        gang_gate=given.gang_gate,
        network_policies=given.network_policies,
        gate_hold_seconds=given.gate_hold_seconds,
        progress_interval_seconds=given.progress_interval_seconds,
        progress_per_second=given.progress_per_second,
        log_level=given.log_level.upper(),
        json_logs=given.json_logs,
    )


def _user(text: str) -> int | None:
    """A user's number; None where it is left to the cluster."""
    if not text.strip():
        return None
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 2147483647, or empty, not {text[:64]!r}")
    return int(text)


def _template_defaults(path: str) -> TemplateDefaults:
    """What a file lays under templates; nothing where there is no file's name."""
    if not path:
        return {}
    try:
        return read_template_defaults(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _names(text: str | None) -> tuple[str, ...]:
    """Names that are separated by commas, each once, in the order of the alphabet."""
    return tuple(sorted({name.strip() for name in (text or "").split(",")} - {""}))


def _own_namespace() -> str:
    """The namespace of the pod that this runs in."""
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return file.read_text().strip() if file.is_file() else "default"
