"""Which programs a cluster is made of, and where Go finds each: data, and the plan of what is still to be built.

The versions are read from the `go.mod` files under `tools/`, so that they stand in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.paths import TOOL_MODULES

KUBERNETES = "k8s.io/kubernetes"


@dataclass(frozen=True)
class Program:
    name: str
    folder: str
    """The folder under `tools/` with the go.mod that requires it."""
    module: str
    """The one whose version is the program's; none for what is written here alone."""
    package: str
    own_version: str = ""
    """For what is written here: to be raised when it changes."""
    tags: str = ""
    """Go's build tags."""

    def version(self) -> str:
        if not self.module:
            return self.own_version
        required = required_version((TOOL_MODULES / self.folder / "go.mod").read_text(), self.module)
        return f"{required}-{self.own_version}" if self.own_version else required

    def binary(self, binaries: Path) -> Path:
        return binaries / f"{self.name}-{self.version()}" / self.name

    def linker_flags(self) -> str:
        """Kubernetes learns its version from the linker; without it every component calls itself v0.0.0."""
        flags = "-s -w"
        if self.module == KUBERNETES:
            version = self.version()
            major, minor = version.removeprefix("v").split(".")[:2]
            stamp = "k8s.io/component-base/version"
            flags += f" -X {stamp}.gitVersion={version} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor}"
        return flags


def _kubernetes(name: str) -> Program:
    return Program(name, "cluster", KUBERNETES, f"{KUBERNETES}/cmd/{name}")


PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "cluster", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
        _kubernetes("kube-apiserver"),
        _kubernetes("kubectl"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        Program("helm", "cluster", "helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm"),
        Program("coredns", "cluster", "github.com/coredns/coredns", "./coredns", own_version="1"),
        Program("kwok", "cluster", "sigs.k8s.io/kwok", "./kwok", own_version="1"),
        Program("kueue", "kueue", "sigs.k8s.io/kueue", "sigs.k8s.io/kueue/cmd/kueue"),
        Program(
            "coscheduling",
            "coscheduling",
            "sigs.k8s.io/scheduler-plugins",
            "sigs.k8s.io/scheduler-plugins/cmd/scheduler",
        ),
        Program("volcano", "volcano", "volcano.sh/volcano", "volcano.sh/volcano/cmd/scheduler"),
        Program("volcano-controllers", "volcano", "volcano.sh/volcano", "volcano.sh/volcano/cmd/controller-manager"),
        Program("pause", "pause", "", ".", own_version="v1"),
        # Without what finds targets in clouds, which is most of it.
        Program(
            "prometheus",
            "prometheus",
            "github.com/prometheus/prometheus",
            "github.com/prometheus/prometheus/cmd/prometheus",
            tags="remove_all_sd",
        ),
    )
}

ASSETS = ("etcd", "kube-apiserver", "kubectl")
"""What a test that needs only an API server needs; the three that setup-envtest provides, too."""

# In the order in which the tests ask for them.
CLUSTER = (
    *ASSETS,
    "helm",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
    "pause",
)


def required_version(go_mod: str, module: str) -> str:
    """The version at which a go.mod requires a module."""
    found = re.search(rf"^(?:require)?\s+{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if not found:
        raise ValueError(f"no version of {module} in its go.mod")
    return found[1]


def to_build(names: Iterable[str], binaries: Path) -> Sequence[Program]:
    """The programs among `names` whose binary is not in the cache yet."""
    return [PROGRAMS[name] for name in names if not PROGRAMS[name].binary(binaries).is_file()]
