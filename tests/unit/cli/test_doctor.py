"""`disttrain doctor` and `disttrain top`."""

import re
from datetime import timedelta
from typing import Any

import pytest

from disttrain import doctor, top
from disttrain.cluster.remote import RemoteJob
from disttrain.main import main
from disttrain_api.crd import CRD_NAME, custom_resource_definition
from tests.builders import NOW, a_job, a_raw_job, a_raw_pod, waiting
from tests.unit.cli.fake_api import FakeApi
from tests.unit.cli.test_cluster_verbs import a_status

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
DEFINITION = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
A_LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


def a_node(gpus: int) -> dict[str, Any]:
    return {"metadata": {"name": f"n{gpus}"}, "status": READY | {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


@pytest.fixture(autouse=True)
def healthy(api: FakeApi) -> None:
    """A cluster that has all that jobs need."""
    api.answers["/version"] = (200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
    api.answers["/apis/disttrain.io"] = (200, {"versions": [{"version": "v1alpha1"}]})
    api.answers[DEFINITION] = (200, custom_resource_definition())
    api.answers[REVIEWS] = (201, {"status": {"allowed": True}})
    spec = {"holderIdentity": "operator-0", "renewTime": "2199-01-01T00:00:00Z"}
    api.put(A_LEASE, {"metadata": {"name": "disttrain-operator"}, "spec": spec})
    api.put("/api/v1/nodes", a_node(8))


def test_a_cluster_that_has_everything_is_well(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    *lines, empty, hint = capfd.readouterr().out.splitlines()
    assert [line[:4] for line in lines] == ["ok  "] * 10
    assert (empty, hint.startswith("Next: ")) == ("", True)
    assert "with the fields that this command knows" in lines[1]


@pytest.mark.parametrize(
    ("path", "answer", "pattern", "code"),
    [
        ("/version", (200, {"major": "1", "minor": "31+", "gitVersion": "v1.31"}), "BAD   cluster: .*1.32 or newer", 1),
        ("/version", (401, {}), "BAD   cluster: .*credentials", 1),
        ("/apis/disttrain.io", (404, {"message": "x"}), "BAD   definition: .*install the chart", 1),
        (DEFINITION, (403, {"message": "no"}), "ok    definition: ", 0),
        (DEFINITION, (200, {"spec": {}}), "look  definition: .*without .* fields such as spec", 0),
        (REVIEWS, (201, {"status": {}}), "BAD   rights in default: you may not create, get", 1),
        (f"{A_LEASE}/disttrain-operator", (404, {"message": "x"}), "BAD   operator: no Lease", 1),
        (f"{A_LEASE}/disttrain-operator", (200, {"spec": {}}), "BAD   operator: no replica leads", 1),
        ("/api/v1/nodes", (403, {"message": "no\x1b[31m"}), r"look  nodes: .*no\\x1b\[31m", 0),
        ("/api/v1/nodes", (200, {"items": []}), "BAD   nodes: none of 0", 1),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(api, capfd, path, answer, pattern, code):
    api.answers[path] = answer
    assert main(["doctor"]) == code
    assert re.search(pattern, capfd.readouterr().out)


def test_an_image_that_pods_wait_for_is_named(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_pod(waiting(a_raw_pod(a_job()), "ImagePullBackOff"))
    assert main(["doctor"]) == 1
    assert "BAD   images: nodes cannot pull an/image:1" in capfd.readouterr().out


@pytest.mark.parametrize("number", ["²", "3²+", "٣", "9" * 5000, "", None, []])
def test_numbers_of_others_may_be_anything(number: Any) -> None:
    assert doctor.of_version({"major": "1", "minor": number}, "x").state in ("ok", "bad")
    allocatable = {"nvidia.com/gpu": number}
    ready = [{"type": "Ready", "status": "True"}]
    assert doctor.of_nodes([{"status": {"allocatable": allocatable, "conditions": ready}}]).state in ("ok", "warn")


def test_an_operator_that_fell_silent_does_not_lead() -> None:
    lease = {"spec": {"holderIdentity": "x", "renewTime": NOW.isoformat()}}
    assert doctor.of_lease(lease, NOW + timedelta(seconds=10)).state == "ok"
    assert doctor.of_lease(lease, NOW + timedelta(seconds=31)).state == "bad"


def test_without_a_cluster_doctor_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["doctor"]) == 1
    assert capfd.readouterr().out.startswith("BAD   cluster: no cluster to talk to: ")


def test_top_shows_bars_and_what_is_left(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    progress = {"step": 50, "totalSteps": 100, "updateTime": "2026-01-01T12:00:00Z"}
    api.put_job(a_raw_job(status={"phase": "Running", "progress": progress}))
    assert main(["top"]) == 0
    assert f"{'█' * 10}{'░' * 10}" in capfd.readouterr().out


def test_what_is_left_follows_from_the_pace_of_the_attempt() -> None:
    at = "2026-01-01T12:{}:00Z"
    attempts = [
        {"number": 1, "startTime": at.format("00"), "endTime": at.format("10"), "checkpointStep": 20},
        {"number": 2, "startTime": at.format("10"), "runningTime": at.format("10")},
    ]
    progress = {"step": 30, "totalSteps": 60, "updateTime": at.format("20")}
    job = RemoteJob(a_raw_job(status={"attempts": attempts, "progress": progress}))
    assert top.left(job, NOW + timedelta(minutes=25)) == "25m"
    assert top.left(RemoteJob(a_raw_job()), NOW) == "-"
    assert [top.bar(*pair) for pair in ((0, 0), (-5, 10), (99, 10))] == ["", "░" * 20, "█" * 20]


def test_stored_jobs_that_this_version_would_refuse_are_named(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    former = {"runPolicy": {"suspend": False}}
    for name, change in (
        ("fine", former),
        ("old", {"storage": {"size": "1Gi"}}),
        ("over", {"storage": {"size": "1Gi"}}),
    ):
        status = a_status("Complete", "Finished") if name == "over" else None
        api.put_job(a_raw_job(name=name, status=status, **change))
    assert main(["doctor"]) == 1
    (line,) = (line for line in capfd.readouterr().out.splitlines() if " jobs: " in line)
    assert line.startswith("BAD   jobs: this version refuses stored jobs: default/old (spec.storage.size: ")
    assert "it is `spec.storage.volumeClaimTemplate` now" in line
    assert "default/fine" not in line
    assert "default/over" not in line
