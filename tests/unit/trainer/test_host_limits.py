"""How many cores a rank may use, from what the kernel tells of the container."""

import os
from pathlib import Path

import pytest

from disttrain_trainer.parameter_server.protocol.sockets import new_context
from disttrain_trainer.runtime.host_limits import cores

MACHINE = 8


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, MACHINE),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, MACHINE),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, MACHINE),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            MACHINE,
        ),
    ],
)
def test_a_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MACHINE)))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores(tmp_path) == expected


def test_a_system_without_affinity_has_all_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores(tmp_path) == 6
    new_context(2).term()
