"""Alert rules and the board: they ask for figures and labels that the operator has, and the chart hands them out."""

import inspect
import json
import re
from pathlib import Path

import yaml

from disttrain_api.status import FailureClass, JobStatus, Phase
from disttrain_operator.__main__ import Operator
from disttrain_operator.metrics import Figures, Metrics
from tests.unit.chart.rendering import CHART, only, render

ALERTS, BOARD = CHART / "monitoring" / "alerts.yaml", CHART / "monitoring" / "board.json"
_SERIES = re.compile(r"\b((?:disttrain|process)_[a-z_]+)(?:\{([^}]*)\})?")
_GIVEN = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
OF_PROMETHEUS = {"job", "pod", "instance"}
"""Labels that a scrape adds."""
KNOWN = {"phase": set(Phase), "class": {*FailureClass, "SinglePod", "Unknown"}}


def exported() -> dict[str, set[str]]:
    """Return the labels of each series on the operator's page, by the series' name."""
    gauges, counters = (
        dict.fromkeys(re.findall(r'^\s+"(\w+)":', inspect.getsource(method), re.MULTILINE), 1.0)
        for method in (Operator._gauges, Operator._counters)
    )
    metrics = Metrics()
    metrics.registry.register(Figures(lambda: gauges, lambda: counters, lambda: {"pods": 1.0}))
    metrics.answered("GET", 200, 0.1)
    metrics.wrote_status(JobStatus(), JobStatus(restarts=1))
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        # A counter without a sample yet has none here, but its name and labels stand.
        found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[str]:
    """Return the expressions of all alerts and panels."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    return [
        *alerts,
        *(target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel["targets"]),
    ]


def test_alerts_and_panels_ask_for_what_the_operator_exports() -> None:
    series = exported() | {"disttrain_restarts_total": {"class"}}
    assert len(queries()) > 20
    for query in queries():
        asked = _SERIES.findall(query)
        assert asked, query
        for name, selector in asked:
            assert name in series, f"{name}: {query}"
            for label, value in _GIVEN.findall(selector):
                assert label in series[name] | OF_PROMETHEUS, query
                assert set(value.split("|")) <= KNOWN.get(label, {*value.split("|")}), query
        for grouping in _GROUPED.findall(query):
            labels = {label.strip() for label in grouping.split(",")}
            assert labels <= set().union(*(series[name] for name, _ in asked)) | OF_PROMETHEUS, query


def test_every_alert_has_a_line_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    alerts = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert [alert for alert in alerts if f"| `{alert}` |" not in page] == []


def test_the_chart_installs_rules_and_board_where_values_ask_for_them(helm: Path) -> None:
    kinds = {document["kind"] for document in render(helm)}
    assert not kinds & {"PrometheusRule", "ConfigMap"}
    values = (
        "prometheusRule.enabled=true",
        "prometheusRule.labels.release=prometheus",
        "grafanaDashboard.enabled=true",
    )
    objects = render(helm, *(f"metrics.{value}" for value in values))
    rule, board = only(objects, "PrometheusRule"), only(objects, "ConfigMap")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert board["data"] == {"disttrain.json": BOARD.read_text()}
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
