"""How Kubernetes learns that the agent of a pod has started its ranks: a startup probe, until it has succeeded once.

It asks the agent's folder and not its port: on the network of a node that may be another pod's. It waits inside the
container, so ranks that start are seen at once, and a pod that waits costs one Event a minute.
"""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import REPORTS_FOLDER, Env

Raw = Mapping[str, Any]

PROBE_MARK = "disttrain-ranks-started"
"""The last word of the probe's command, whatever its version, by which it is known."""
_WAIT_SECONDS = 60
_SCRIPT = f"""
import os, sys, time
for _ in range({_WAIT_SECONDS * 5}):
    if os.path.isdir(os.path.join(os.environ["{Env.SCRATCH}"], "{REPORTS_FOLDER}")):
        sys.exit()
    time.sleep(0.2)
sys.exit("no rank has been started: the agent waits for the address of worker 0")
"""


def startup_probe() -> dict[str, Any]:
    """Return the probe. It ends no container: the agent gives up long before it has failed so often."""
    return {
        "exec": {"command": ["python3", "-P", "-S", "-c", _SCRIPT, PROBE_MARK]},
        "periodSeconds": 1,
        # Where the ranks leave it no processor it takes its time.
        "timeoutSeconds": 2 * _WAIT_SECONDS,
        "failureThreshold": 1_000_000,
    }


def asks_for_ranks(container: Raw) -> bool:
    """Return whether the operator added the startup probe of this container, and not its template."""
    command = ((container.get("startupProbe") or {}).get("exec") or {}).get("command") or []
    return bool(command) and command[-1] == PROBE_MARK
