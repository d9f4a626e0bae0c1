"""The schema that models and rules become; what a real API server makes of it is tests/integration/test_crd.py's."""

from collections.abc import Iterator
from typing import Any

import pytest

from disttrain_api import Mesh
from disttrain_api.batch import resolve_batch
from disttrain_api.crd import custom_resource_definition, openapi_schema, to_helm
from disttrain_api.errors import LayoutError
from disttrain_api.moved import CARRIED
from disttrain_api.pod_template import from_openapi, pod_template_schema
from disttrain_api.size import CONFIG
from disttrain_api.spec import JobSpec
from disttrain_api.structural import with_defaults
from tests.builders import a_manifest

SPEC = openapi_schema()["properties"]["spec"]["properties"]


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of ours below a schema; templates are Kubernetes'."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        if name not in ("template", "env", "envFrom", "resources", "volumeClaimTemplate"):
            yield from fields(field.get("items", field), f"{path}.{name}")


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_of_ours_is_described(part: str) -> None:
    found = dict(fields(openapi_schema()["properties"][part]))
    assert len(found) > 20
    undescribed = {f"{part}{path}" for path, field in found.items() if not field.get("description")}
    assert undescribed <= set(CARRIED)


def test_degrees_have_no_default() -> None:
    """An absent degree means "what is left": a default in the stored object would say otherwise."""
    assert [path for path, field in fields(SPEC["parallelism"]) if path.endswith("Degree") and "default" in field] == []


def test_the_status_has_no_defaults() -> None:
    assert [path for path, field in fields(openapi_schema()["properties"]["status"]) if "default" in field] == []


def test_arguments_of_models_are_kept_as_they_are_down_to_a_depth() -> None:
    for part in ("model", "data"):
        value = SPEC["training"]["properties"][part]["properties"]["config"]["additionalProperties"]
        for level in range(2, CONFIG.depth + 1):
            assert value["x-kubernetes-preserve-unknown-fields"] is True, level
            assert "type" not in value, level
            assert value["items"] == value["additionalProperties"], level
            value = value["items"]
        assert (value["maxItems"], value["maxProperties"]) == (0, 0)


def test_the_chart_may_leave_the_definition_out_and_keep_it() -> None:
    text = to_helm(custom_resource_definition())
    assert text.startswith("{{- if .Values.crds.enabled }}\n")
    assert text.endswith("{{- end }}\n")
    assert "{{- if .Values.crds.keep }}\n  annotations:\n    helm.sh/resource-policy: keep\n  {{- end }}\n" in text


def test_a_template_of_a_definition_in_the_definition_is_refused() -> None:
    with pytest.raises(ValueError, match="Helm would take a part"):
        to_helm({"description": "{{ .Values }}"})


def test_a_pod_template_needs_nothing_and_offers_what_a_pod_has() -> None:
    pod = pod_template_schema()["properties"]["spec"]
    assert "required" not in pod
    assert {"containers", "nodeSelector", "tolerations", "volumes"} <= set(pod["properties"])
    assert "ephemeralContainers" not in pod["properties"]


def test_keys_of_lists_have_the_defaults_of_a_pod() -> None:
    spec = {"containers": [{"name": "a", "ports": [{"containerPort": 1}]}], "imagePullSecrets": [{}]}
    filled = with_defaults({"spec": spec}, pod_template_schema())["spec"]
    assert filled["containers"][0]["ports"] == [{"containerPort": 1, "protocol": "TCP"}]
    assert filled["imagePullSecrets"] == [{"name": ""}]
    assert spec["imagePullSecrets"] == [{}]


def test_a_pod_schema_is_reduced_to_what_validates() -> None:
    """References are put in place; descriptions, defaults and what only clients read fall away."""
    ref = {"$ref": "#/components/schemas/io.k8s.api.core.v1.Container"}
    named = {"name": {"type": "string", "default": "", "description": "Its name."}}
    container = {"type": "object", "required": ["name"], "properties": named | {"env": {"type": "array", "items": ref}}}
    lists = {
        key: {"type": "array", "x-kubernetes-patch-strategy": "merge", "items": {"allOf": [ref], "default": {}}}
        for key in ("containers", "initContainers", "volumes", "ephemeralContainers")
    }
    leaf = {"type": "object", "properties": named}
    schemas = {
        "io.k8s.api.core.v1.PodTemplateSpec": {
            "type": "object",
            "properties": {
                "metadata": {"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
                "spec": {
                    "type": "object",
                    "required": ["containers"],
                    "properties": lists | {"restartPolicy": {"type": "string", "default": ""}},
                },
            },
        },
        "io.k8s.api.core.v1.Container": container | {"properties": named | {"env": {"type": "array", "items": leaf}}},
    }
    pod = from_openapi({"components": {"schemas": schemas}})["properties"]["spec"]
    assert pod["properties"]["containers"] == {
        "type": "array",
        "maxItems": 16,
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "maxLength": 63},
                "env": {
                    "type": "array",
                    "maxItems": 256,
                    "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 256}}},
                },
            },
        },
    }


@pytest.mark.parametrize(
    ("training", "replicas", "sizes"),
    [
        ({"microBatchSize": 8}, 4, (8, 1, 32)),
        ({"microBatchSize": 8, "gradientAccumulationSteps": 3}, 2, (8, 3, 48)),
        ({"microBatchSize": None, "globalBatchSize": 64}, 2, (32, 1, 64)),
        ({"microBatchSize": None, "globalBatchSize": 64, "gradientAccumulationSteps": 4}, 2, (8, 4, 64)),
        ({"microBatchSize": 8, "globalBatchSize": 64}, 2, (8, 4, 64)),
    ],
)
def test_batch_sizes_that_are_left_out_follow_from_the_others(training, replicas, sizes):
    spec = JobSpec.model_validate(a_manifest(training=training)["spec"])
    assert spec.training is not None
    batch = resolve_batch(spec.training, replicas)
    assert (batch.micro, batch.accumulation, batch.world) == sizes


def test_a_pipeline_multiplies_the_batch() -> None:
    spec = JobSpec.model_validate(a_manifest(training={"microBatchSize": 8, "gradientAccumulationSteps": 3})["spec"])
    assert spec.training is not None
    batch = resolve_batch(spec.training, 2, pipeline=4)
    assert (batch.world, batch.passes) == (8 * 3 * 4 * 2, 12)


def test_layouts_that_do_not_fit_raise_with_their_numbers() -> None:
    spec = JobSpec.model_validate(a_manifest(training={"globalBatchSize": 24})["spec"])
    assert spec.training is not None
    with pytest.raises(LayoutError, match="which is 16 x 2 x 1 = 32"):
        resolve_batch(spec.training, 2)
    with pytest.raises(LayoutError, match="world size 8 must equal the product of the degrees, which is 6"):
        Mesh.of(spec.parallelism.model_copy(update={"data_parallel_replicate_degree": 6}), 8)


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_list_says_how_it_is_merged(part: str) -> None:
    lists = {
        path: field for path, field in fields(openapi_schema()["properties"][part]) if field.get("type") == "array"
    }
    assert len(lists) > 5
    assert [path for path, field in lists.items() if "x-kubernetes-list-type" not in field] == []
