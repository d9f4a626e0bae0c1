"""A planned pod -> the process that stands for it: command, environment, working folder. Pure.

What a container's image would give, the machine gives: the user's own environment, the current folder, and `python`,
`python3` and `torchrun` from where this command's own interpreter lies.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Manifest = Mapping[str, Any]

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)")
# This run may have been started within another distributed run, which has set these.
_FOREIGN = re.compile(
    r"(DISTTRAIN|PET|TORCHELASTIC)_.*|(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME"
)
# The plan points these to the pod's scratch folder because a container's user has no home and no place for
# temporary files; here the user has both.
_OF_A_USER = ("HOME", "USER", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Launch:
    """A process to start."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


def launch(
    pod: Manifest,
    *,
    shell: Mapping[str, str],
    local: Mapping[str, str],
    scratch_defaults: Mapping[str, str],
    folder: Path,
) -> Launch:
    """The process of a pod's trainer container.

    `shell` is the user's environment; `local` is what this machine says to every pod, unless its template says
    otherwise; `scratch_defaults` are the plan's own values for the user's folders.
    """
    container = pod["spec"]["containers"][0]
    environment = {name: value for name, value in shell.items() if not _FOREIGN.fullmatch(name)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{shell.get('PATH', '/usr/bin:/bin')}"
    environment |= local
    defined: dict[str, str] = {}
    for entry in container.get("env") or []:
        name, value = entry["name"], entry.get("value")
        if "valueFrom" in entry:
            if name in shell:
                defined[name] = shell[name]
            continue
        if name in _OF_A_USER and value == scratch_defaults.get(name):
            continue
        environment[name] = defined[name] = expand(value or "", defined)
    command = [
        expand(word, environment) for word in (*(container.get("command") or ()), *(container.get("args") or ()))
    ]
    if command and command[0] in ("python", "python3"):
        command[0] = sys.executable
    return Launch(tuple(command), environment, folder / container.get("workingDir", "."))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' own references: $(NAME) becomes the value, an unknown one stays, $$ becomes $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
