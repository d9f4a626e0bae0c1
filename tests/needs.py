"""What steps of the tests need of a machine. Each lack is one sentence, said before anything runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tools import chromium
from tools.cluster import preflight
from tools.cluster.errors import MissingError

Need = Callable[[], str | None]
"""Returns what is missing and what to do about it, or None."""
INSTALLER = ".ci/install-debian"
NO_BROWSER = f"Chromium is missing: `bash {INSTALLER} browser` installs it"


def api_server() -> str | None:
    """An API server's programs, or Go, which builds them."""
    if shutil.which("go") or os.environ.get("KUBEBUILDER_ASSETS"):
        return None
    return "Go is missing: install Go 1.26 or newer (go.dev/doc/install), or set KUBEBUILDER_ASSETS"


def compiler() -> str | None:
    """What torch.compile needs on a CPU."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    missing = [name for name, there in (("g++", shutil.which("g++")), (str(headers), headers.exists())) if not there]
    return f"{' and '.join(missing)} missing: `bash {INSTALLER}` installs them" if missing else None


def browser() -> str | None:
    """Chromium, which is installed where we may."""
    if chromium.program() is None and os.geteuid() == 0:
        subprocess.run(["bash", INSTALLER, "browser"], cwd=Path(__file__).parents[1], check=False)
    return NO_BROWSER if chromium.program() is None else None


def cluster() -> str | None:
    """A cluster with nodes: KUBECONFIG's, or what starts one on this machine, which is installed where we may."""
    if os.environ.get("KUBECONFIG"):
        return None
    if os.geteuid() == 0:
        subprocess.run(["bash", INSTALLER, "cluster"], cwd=Path(__file__).parents[1], check=False)
    try:
        preflight.check()
    except MissingError as lack:
        return str(lack)
    return None
