"""The kernel's count of processes that it has killed for want of memory, wherever it stands."""

import pytest

from disttrain_agent.memory_kills import memory_kills

EVENTS = "low 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/pod/a\n", {"pod/a/memory.events": EVENTS}, 3),
        ("0::/\n", {"memory.events": EVENTS}, 3),
        ("0::/../../of/the/host\n", {"memory.events": EVENTS}, 3),
        ("4:memory:/a\n1:cpu:/a\n0::/\n", {"memory/a/memory.oom_control": CONTROL}, 5),
        ("4:memory:/of/the/host\n", {"memory/memory.oom_control": CONTROL}, 5),
        ("4:memory:/a\n", {"memory/a/memory.oom_control": "under_oom 0\n"}, None),
        ("0::/\n", {}, None),
        (None, {"memory.events": EVENTS}, None),
    ],
)
def test_the_count_is_read_from_the_group_of_this_process(tmp_path, groups, files, count):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_kills(tmp_path) == count
