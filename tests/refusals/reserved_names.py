"""Jobs for the rules about labels and annotations that the operator alone sets, wherever a template can carry them."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import IMAGE, SERVERS, WORKERS, Refusal, own_program, servers

Raw = dict[str, Any]
MINE = {"mine": "fine", "disttrain.iox/role": "fine", "x.disttrain.io/role": "fine", "disttrain.io": "fine"}
MANAGED_BY = "app.kubernetes.io/managed-by"


def claimed(**metadata: Any) -> Raw:
    """A pod spec with a volume whose claim has this metadata, and others that have none."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"metadata": metadata, "spec": spec}
    return {
        "volumes": [
            {"name": "empty", "emptyDir": {}},
            {"name": "plain", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}},
            {"name": "claimed", "ephemeral": {"volumeClaimTemplate": claim}},
        ]
    }


def workers(metadata: Any = None, **pod: Any) -> Raw:
    """Changes that give the workers a template with this metadata and pod spec."""
    return {"workers": {"template": own_program(IMAGE, **pod)["template"] | {"metadata": metadata or {}}}}


def of_servers(metadata: Any = None, **pod: Any) -> Raw:
    """The same for parameter servers."""
    return servers(IMAGE, metadata=metadata, **pod)


LABEL = (
    "labels that begin with 'disttrain.io/', and 'app.kubernetes.io/managed-by', are set by the operator: remove them"
)
ANNOTATION = "annotations that begin with 'disttrain.io/' are set by the operator: remove them"
CLAIM = (
    "the claim of volume `claimed` has a label or annotation that begins with 'disttrain.io/', or the label"
    " 'app.kubernetes.io/managed-by', which are set by the operator: remove them"
)

RESERVED_NAME_REFUSALS = tuple(
    refusal
    for role, path, changes in (("Workers", WORKERS, workers), ("Servers", SERVERS, of_servers))
    for refusal in (
        *(
            Refusal(
                f"{role}Labels", f"{path}.metadata.labels", LABEL, changes(metadata={"labels": MINE | {label: "x"}})
            )
            for label in ("disttrain.io/role", "disttrain.io/of-a-later-version", "disttrain.io/", MANAGED_BY)
        ),
        *(
            Refusal(
                f"{role}Annotations",
                f"{path}.metadata.annotations",
                ANNOTATION,
                changes(metadata={"annotations": MINE | {annotation: "x"}}),
            )
            for annotation in ("disttrain.io/reserved-node", "disttrain.io/released-at", "disttrain.io/later")
        ),
        *(
            Refusal(f"{role}Claims", f"{path}.spec.volumes", CLAIM, changes(**claimed(**metadata)))
            for metadata in (
                {"labels": MINE | {"disttrain.io/job-uid": "x"}},
                {"labels": {MANAGED_BY: "x"}},
                {"annotations": MINE | {"disttrain.io/job-uid": "x"}},
            )
        ),
    )
)

RESERVED_NAMES_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "labels and annotations of one's own": workers(metadata={"labels": MINE, "annotations": MINE | {MANAGED_BY: "x"}}),
    "labels and annotations of one's own on servers": of_servers(metadata={"labels": MINE, "annotations": MINE}),
    "a claim of a volume with labels of one's own": workers(**claimed(labels=MINE, annotations=MINE)),
    "a claim of a volume of a server": of_servers(**claimed(labels=MINE)),
}
