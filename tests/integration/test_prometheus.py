"""Alerts and board, asked of a real Prometheus that scrapes the operator."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operator_process import OperatorProcess, Team, a_team, eventually, running_operator
from tests.unit.chart.test_monitoring import ALERTS, queries
from tests.waiting import GENEROUS
from tools.cluster.build import ensure
from tools.cluster.control_plane import ControlPlane
from tools.cluster.ports import free_port
from tools.cluster.processes import dying_with_parent

_COMPARISON = re.compile(r" (?:==|<|>) [\d.]+(?= or |$)")


class Prometheus:
    """A server that scrapes one target each second."""

    def __init__(self, folder: Path, target: str) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "disttrain", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        command = [str(ensure(["prometheus"])["prometheus"]), f"--config.file={folder / 'prometheus.yaml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={self._address}"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(dying_with_parent(command), stdout=log, stderr=log)

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=GENEROUS) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, tmp_path_factory.mktemp("operator")) as process:
        yield process


@pytest.fixture
def team(control_plane: ControlPlane, operator: OperatorProcess, request: pytest.FixtureRequest) -> Team:
    return a_team(control_plane, request)


@pytest.fixture
def prometheus(operator: OperatorProcess, tmp_path: Path) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path, operator.address)
    try:
        eventually(lambda: server.ask("query", query="up == 1")["result"], server.log)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_every_query_of_alerts_and_board_has_an_answer(team: Team, prometheus: Prometheus) -> None:
    """Red where a query names what is not there, or adds up what does not belong together. A job restarts meanwhile."""
    team.create(workers={"replicas": 2})
    team.run(team.wait_for_pods(2))
    team.wait_for("Running")
    team.finish(team.pods()[:1], code=1)
    team.run(team.wait_for_pods(2, attempt=2))
    team.wait_for("Running")
    # What an alert compares with its threshold, a range of Grafana's own choice, and codes that there are.
    changes = {"$__rate_interval": "1m", "0|5..": "2.."}
    asked = {
        reduce(lambda text, old: text.replace(old, changes[old]), changes, query) for query in map(_value, queries())
    }

    def unanswered() -> set[str]:
        return {query for query in asked if not prometheus.ask("query", query=query)["result"]}

    eventually(lambda: not unanswered(), unanswered, pause=0.5)
    rules = eventually(lambda: _evaluated(prometheus), prometheus.log, pause=0.2)
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def _value(query: str) -> str:
    return _COMPARISON.sub("", query)


def _evaluated(prometheus: Prometheus) -> list[dict[str, Any]]:
    """The alert rules, once each has been looked at."""
    found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    return found if all(rule["health"] != "unknown" for rule in found) else []
