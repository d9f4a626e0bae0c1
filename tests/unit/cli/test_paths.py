"""Names that are no names stay one part of a path, or are refused: nothing else of the cluster is asked."""

import pytest

from disttrain.cluster.paths import path_of
from disttrain.errors import CommandError
from disttrain.main import main
from tests.builders import a_job, a_raw_job, a_raw_pod, running
from tests.unit.cli.fake_api import JOBS, FakeApi
from tests.unit.cli.test_cluster_verbs import a_status

HOSTILE, QUOTED = "team/secrets/../a?watch=true#%2f", "team%2Fsecrets%2F..%2Fa%3Fwatch%3Dtrue%23%252f"
VERBS = ["list", "history", "get digits", "events digits", "logs digits", "suspend digits", "delete digits", "doctor"]
RIGHTS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def asked_in_namespaces(api: FakeApi, verb: str, namespace: str) -> list[str]:
    """What a verb asks for, from the name of the namespace on."""
    api.asked.clear()
    main([*verb.split(), "-n", namespace])
    found = [path.partition("/namespaces/")[2] for path in api.asked if "/namespaces/" in path]
    return [path for path in found if path != "kube-system/leases/disttrain-operator"]


def test_a_namespace_stays_one_part_of_each_path(api: FakeApi) -> None:
    job, pod = a_raw_job(status=a_status("Running")), running(a_raw_pod(a_job()))
    job["metadata"]["namespace"] = HOSTILE
    api.put(JOBS.format(QUOTED), job)
    api.put(f"/api/v1/namespaces/{QUOTED}/pods", pod)
    api.answers |= {"/version": (200, {"gitVersion": "v1.34.0"}), RIGHTS: (201, {"status": {"allowed": True}})}
    kinds = set()
    for verb in VERBS:
        found = [path.split("/") for path in asked_in_namespaces(api, verb, HOSTILE)]
        assert {namespace for namespace, *_ in found} == {QUOTED}, verb
        kinds |= {(parts[1].partition("?")[0], parts[-1].partition("?")[0]) for parts in found}
    assert {
        ("disttrainingjobs", "digits"),
        ("configmaps", "disttrain-history"),
        ("events", "events"),
        ("pods", "pods"),
        ("pods", "log"),
        ("leases", "disttrain-operator"),
    } <= kinds


def test_nothing_is_asked_of_what_lies_above_a_namespace(api: FakeApi) -> None:
    """A server takes dots of a path for what they mean, quoted or not."""
    for verb in VERBS:
        assert asked_in_namespaces(api, verb, "..") == [], verb
    for namespace in ("", ".", ".."):
        with pytest.raises(CommandError, match=f"'{namespace}' is no name in a cluster"):
            path_of("/api/v1", "pods", namespace)
