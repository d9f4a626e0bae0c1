"""Runs commands of the machine; one that fails becomes one line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.cluster.errors import ClusterError, MissingError


def run(
    command: Sequence[str | Path],
    *,
    doing: str = "",
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    text_in: str | None = None,
    log: Path | None = None,
) -> str:
    """Returns what the command printed, or keeps that in `log`. `doing` begins the error's sentence."""
    parts = [str(part) for part in command]
    try:
        done = subprocess.run(
            parts,
            check=False,
            cwd=folder,
            env=os.environ | dict(environment or {}),
            input=text_in,
            stdin=subprocess.DEVNULL if text_in is None else None,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as absent:
        raise MissingError(
            f"{parts[0]} is missing: `bash .ci/install-debian cluster` installs what is needed"
        ) from absent
    if log:
        log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        last = ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"])[-1]
        raise ClusterError(f"{doing or ' '.join(parts)[:200]} failed: {last[:400]}" + (f" (log: {log})" if log else ""))
    return done.stdout


def succeeds(command: Sequence[str | Path]) -> bool:
    try:
        run(command)
    except ClusterError:
        return False
    return True
