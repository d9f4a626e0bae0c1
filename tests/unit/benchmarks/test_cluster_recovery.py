"""What the benchmark of losses on real nodes asks for, and which nodes it cuts: a cluster tells it only in an hour."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cluster_recovery
from benchmarks.cluster_recovery import is_ready, job, name_in_lease, recoveries_of_nodes
from disttrain_api.validate import read_spec

LEADERS = "node1"


@pytest.mark.parametrize("strategy", ["InPlace", "Recreate"])
def test_its_job_keeps_the_rules(strategy: str) -> None:
    spec, problems = read_spec(job(strategy)["spec"], None)
    assert (spec is not None, problems) == (True, [])


def test_a_node_is_ready_where_the_cluster_says_so() -> None:
    for status, ready in (("True", True), ("Unknown", False)):
        conditions = [SimpleNamespace(type="DiskPressure", status="True"), SimpleNamespace(type="Ready", status=status)]
        assert is_ready(SimpleNamespace(status=SimpleNamespace(conditions=conditions))) is ready


def test_the_leader_is_found_by_the_name_in_its_lease() -> None:
    assert (
        name_in_lease("disttrain-system/disttrain/disttrain-operator-5b7c-x2x4f_0c1d2e3f")
        == "disttrain-operator-5b7c-x2x4f"
    )
    assert name_in_lease("operator-1_0c1d2e3f") == "operator-1"


class Cluster:
    """Jobs whose pods are on these nodes, one job after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *jobs: tuple[str, str]) -> None:
        self.jobs, self.done, self.trains_again = iter(jobs), list[str](), True
        self.cut: str | None = None
        monkeypatch.setattr(cluster_recovery, "a_namespace", self.namespace)
        monkeypatch.setattr(cluster_recovery, "Gang", lambda *_: self)
        monkeypatch.setattr(cluster_recovery, "leaders_node", lambda core: LEADERS)
        monkeypatch.setattr(cluster_recovery, "is_ready", lambda node: True)
        monkeypatch.setattr(cluster_recovery.full, "kill_node", self.kill)
        monkeypatch.setattr(cluster_recovery.full, "start_node", self.start)

    @contextlib.contextmanager
    def namespace(self, core: Any) -> Iterator[str]:
        yield "bench"
        assert self.cut is None, "a node is back before its job is gone"

    def nodes(self) -> tuple[str, str]:
        return next(self.jobs)

    def trains(self, since: float) -> float:
        if self.cut is not None and not self.trains_again:
            raise TimeoutError
        return since + 20.0

    def has_checkpoint(self) -> None:
        self.done.append("has a checkpoint")

    def kill(self, node: str) -> None:
        self.cut = node
        self.done.append(f"cut {node}")

    def start(self, node: str) -> None:
        assert node == self.cut
        self.cut = None
        self.done.append(f"start {node}")

    def read_node(self, name: str) -> str:
        return name


def test_only_the_node_of_the_second_pod_alone_is_cut_and_never_the_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, ("node2", "node1"), ("node2", "node2"), ("node1", "node2"), ("node3", "node2"))
    taken = recoveries_of_nodes(cluster, "InPlace", 2)  # type: ignore[arg-type]
    assert [round(seconds) for seconds in taken] == [20, 20]
    assert cluster.done == ["has a checkpoint", "cut node2", "start node2"] * 2


def test_a_node_comes_back_where_the_job_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, ("node1", "node2"))
    cluster.trains_again = False
    with pytest.raises(TimeoutError):
        recoveries_of_nodes(cluster, "InPlace", 1)  # type: ignore[arg-type]
    assert cluster.done[-1] == "start node2"


def test_it_gives_up_where_no_job_is_placed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, *[("node2", "node1")] * 9)
    with pytest.raises(RuntimeError, match="of 4 jobs 0 had their second pod"):
        recoveries_of_nodes(cluster, "InPlace", 1)  # type: ignore[arg-type]
    assert cluster.done == []
