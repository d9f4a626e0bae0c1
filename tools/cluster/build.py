"""Builds the programs once, into a cache keyed by version.

A killed build leaves nothing that looks finished (each binary is renamed into place); two builds at once take turns.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.cluster.errors import MissingError
from tools.cluster.locks import exclusive
from tools.cluster.paths import TOOL_MODULES, binaries_folder, for_one_run
from tools.cluster.programs import ASSETS, PROGRAMS, Program, to_build
from tools.cluster.shell import run

Log = Callable[[str], None]


def silent(_: str) -> None:
    """For callers that are libraries."""


def ensure(names: Iterable[str], log: Log = silent) -> dict[str, Path]:
    """Builds what is missing; returns each program's path."""
    names = list(names)
    binaries = binaries_folder()
    if to_build(names, binaries):
        _require_go()
        for program in to_build(names, binaries):
            # One at a time of a module: side by side they would compile what they share twice. Given back after each:
            # who needs a small one does not wait for all the large ones that another builds.
            with exclusive(f"build-{program.folder}"):
                if to_build([program.name], binaries):
                    log(f"building {program.name} {program.version()}")
                    _build(program, program.binary(binaries))
    return {name: PROGRAMS[name].binary(binaries) for name in names}


def ensure_assets(log: Log = silent) -> Path:
    """A folder with etcd, kube-apiserver and kubectl: the one KUBEBUILDER_ASSETS names, else one of our own."""
    if given := os.environ.get("KUBEBUILDER_ASSETS"):
        absent = [name for name in ("etcd", "kube-apiserver") if not (Path(given) / name).is_file()]
        if absent:
            raise MissingError(f"KUBEBUILDER_ASSETS={given} holds no {' and no '.join(absent)}: unset it or correct it")
        return Path(given)
    return _gather(ensure(ASSETS, log))


def path_of(name: str) -> Path:
    """One program's path, built if need be; etcd and the API server come from KUBEBUILDER_ASSETS where that is set."""
    if name in ("etcd", "kube-apiserver"):
        return ensure_assets() / name
    return ensure([name])[name]


def sources_of(name: str) -> Path:
    """The folder of a program's module, with the CustomResourceDefinitions and defaults that it ships."""
    program = PROGRAMS[name]
    _require_go()
    command = ["go", "mod", "download", "-json", program.module]
    answer = run(command, doing=f"fetching {program.module}", folder=TOOL_MODULES / program.folder)
    return Path(json.loads(answer)["Dir"])


def _gather(programs: dict[str, Path]) -> Path:
    """One folder of links: what KUBEBUILDER_ASSETS is for other tools is one folder, ours is one for each program."""
    versions = "-".join(PROGRAMS[name].version() for name in ("kube-apiserver", "etcd"))
    folder = binaries_folder() / f"assets-{versions}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, binary in programs.items():
        if not (folder / name).exists():
            fresh = folder / f".{name}.{os.getpid()}"
            fresh.symlink_to(binary)
            fresh.replace(folder / name)
    return folder


# A sixth of a build's CPU is the compilers' and the linker's search for garbage; they end before it is much.
_UNHURRIED_GARBAGE_COLLECTION = {"GOGC": "off", "GOMEMLIMIT": "2GiB"}


def _require_go() -> None:
    if not shutil.which("go"):
        raise MissingError("Go is missing: install Go 1.26 or newer (go.dev/doc/install), or set KUBEBUILDER_ASSETS")


def flags(program: Program, quick: bool) -> list[str]:
    """`quick` builds are for one run: without inlining, and without proofs that a check can be spared, the compiler has
    three tenths less to do, and the program more."""
    # No debug information: the linker drops it, and to write it is a tenth of the compiler's work.
    compiler = "-gcflags=all=-dwarf=false" + (" -l -d=ssa/prove/off" if quick else "")
    tags = ["-tags", program.tags] if program.tags else []
    return ["-trimpath", *tags, compiler, "-ldflags", program.linker_flags()]


def _build(program: Program, binary: Path) -> None:
    binary.parent.mkdir(parents=True, exist_ok=True)
    unfinished = binary.with_name(f".{program.name}.unfinished")
    run(
        ["go", "build", *flags(program, quick=for_one_run()), "-o", str(unfinished), program.package],
        doing=f"building {program.name} {program.version()}",
        folder=TOOL_MODULES / program.folder,
        environment={"CGO_ENABLED": "0", **_UNHURRIED_GARBAGE_COLLECTION},
    )
    unfinished.replace(binary)
