"""Outputs of other programs, as they were printed."""

from pathlib import Path

KUBELET_BYTES = 2048
"""What Kubernetes keeps of the log of a container that wrote no last words."""


def torchrun_log(name: str) -> str:
    """What torchrun of torch 2.13 printed: see the programs in tests/unit/trainer/test_torchrun.py."""
    return (Path(__file__).parent / "torchrun" / f"{name}.txt").read_text()


def kept(log: str) -> str:
    """The end of the log that the kubelet puts into the status."""
    return log.encode()[-KUBELET_BYTES:].decode(errors="ignore")
