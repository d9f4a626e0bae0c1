"""What `null` means: every value of the chart that is set to it is empty, or refused by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_operator.settings import read_settings
from tests.unit.chart.rendering import CHART, run

# From cold, helm is built first, beside all that others build.
pytestmark = pytest.mark.timeout(1800)

# What is rendered by switches that are off by default, and what has no empty value but null.
EVERYTHING = (
    "gangGate.enabled=true",
    "networkPolicy.perJob=true",
    "networkPolicy.operator.enabled=true",
    'tokenKey.existingSecret="mine"',
    "dashboard.enabled=true",
    *(f"metrics.{part}.enabled=true" for part in ("serviceMonitor", "prometheusRule", "grafanaDashboard")),
    "crds.enabled=false",
)
NO_EMPTY_VALUE = {
    "image.pullPolicy": "imagePullPolicy:",
    "podDefaults.userId": "--user-id=65532",
    "replicas": "replicas: 2",
    "revisionHistoryLimit": "revisionHistoryLimit: 10",
}
"""Values that null takes out, and what is rendered by the default."""


def fields(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Path, schema, and whether something must be there, of each section and each value."""
    for name, field in schema["properties"].items():
        yield prefix + name, field, name in schema.get("required", ())
        if "properties" in field:
            yield from fields(field, f"{prefix}{name}.")


FIELDS = list(fields(json.loads((CHART / "values.schema.json").read_text())))
OPTIONAL = [(path, field) for path, field, needed in FIELDS if not needed]


def rendered(helm: Path, *values: str) -> tuple[int, str]:
    flags = [f"--set-json={value}" for value in (*EVERYTHING, *values)]
    done = run(helm, "template", "disttrain", str(CHART), "--kube-version=1.34.0", *flags)
    return done.returncode, done.stdout or done.stderr


def test_null_where_a_value_must_say_something_is_refused_by_its_name(helm: Path) -> None:
    for path in (path for path, _, needed in FIELDS if needed):
        above, _, name = path.rpartition(".")
        code, message = rendered(helm, f"{path}=null")
        assert code != 0, path
        place = "/" + above.replace(".", "/") if above else ""
        assert f"at '{place}': missing property '{name}'" in message, path


@pytest.mark.parametrize(("path", "field"), OPTIONAL, ids=[path for path, _ in OPTIONAL])
def test_null_elsewhere_is_the_empty_value(helm: Path, path: str, field: dict[str, Any]) -> None:
    code, text = rendered(helm, f"{path}=null")
    assert code == 0, text
    deployments = [part for part in yaml.load_all(text, yaml.CSafeLoader) if part and part["kind"] == "Deployment"]
    pods = [deployment["spec"]["template"]["spec"] for deployment in deployments]
    (container,) = [one for pod in pods for one in pod["containers"] if one["name"] == "operator"]
    read_settings(container["args"], {})
    if path in NO_EMPTY_VALUE:
        default = NO_EMPTY_VALUE[path]
        assert default not in text
        assert default in rendered(helm)[1]
    else:
        kind = field.get("type", "string")
        empty: Any = {"string": "", "array": [], "object": {}}[kind if isinstance(kind, str) else kind[0]]
        # An empty object is laid over the default and changes nothing: only what stands in it can be taken out.
        nothing = dict.fromkeys(default_of(path)) if empty == {} else empty
        assert text == rendered(helm, f"{path}={json.dumps(nothing)}")[1]


def default_of(path: str) -> dict[str, Any]:
    value = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in path.split("."):
        value = value.get(name, {})
    return dict(value)
