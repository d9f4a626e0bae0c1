"""A stored job on a real API server: what of it may change and when, and how kubectl shows it."""

import json

import pytest

from disttrain_api.rules import FREEZE_RULES
from disttrain_api.run_policy import RunPolicy
from disttrain_api.spec import JobSpec
from tests.builders import merge
from tests.integration.test_crd import Jobs, Raw, causes
from tests.integration.test_crd import jobs as jobs

FREE = (
    {"suspend": True},
    {"activeDeadlineSeconds": 60},
    {"runPolicy": {"maxRestarts": 9}},
    {"runPolicy": {"restartStrategy": "InPlace"}},
    {"runPolicy": {"progressDeadlineSeconds": 600}},
    {"runPolicy": {"startingDeadlineSeconds": 60}},
    {"runPolicy": {"terminationTimeoutSeconds": 5}},
    {"ttlSecondsAfterFinished": 60},
    {"runPolicy": {"failureLogInStatus": True}},
    {"runPolicy": {"podSecurity": "Template"}},
)
FROZEN: dict[str, Raw] = {
    "spec.workers": {"workers": {"replicas": 3}},
    "spec.parameterServers": {"parameterServers": {}},
    "spec.parallelism": {"parallelism": {"dataParallelReplicateDegree": 2}},
    "spec.training": {"training": {"steps": 7}},
    "spec.storage": {"storage": {"claimName": "another"}},
    "spec.progress": {"progress": {"totalSteps": 9, "logRules": [{"pattern": "(?P<step>[0-9]+)"}]}},
    "spec.runPolicy.restartPolicy": {"runPolicy": {"restartPolicy": "Never"}},
    "spec.runPolicy.restartBackoffSeconds": {"runPolicy": {"restartBackoffSeconds": 1}},
    "spec.runPolicy.failurePolicy": {"runPolicy": {"failurePolicy": {"rules": [{"action": "FailJob"}]}}},
    "spec.runPolicy.successPolicy": {"runPolicy": {"successPolicy": {"operator": "Any"}}},
    "spec.runPolicy.nodeSuspicion": {"runPolicy": {"nodeSuspicion": {"failures": 5}}},
    "spec.runPolicy.disruptionBudget": {"runPolicy": {"disruptionBudget": {"minAvailable": 1}}},
    "spec.runPolicy.schedulingPolicy": {"runPolicy": {"schedulingPolicy": {"priorityClassName": "high"}}},
    "spec.managedBy": {"managedBy": "example.com/other"},
    "spec.runPolicy.cleanPodPolicy": {"runPolicy": {"cleanPodPolicy": "All"}},
}


def part_of(change: Raw) -> str:
    """Return the path of the one field that a change of the spec holds."""
    (part,) = change
    return f"spec.runPolicy.{next(iter(change[part]))}" if part == "runPolicy" else f"spec.{part}"


@pytest.fixture(scope="module")
def begun(jobs: Jobs) -> str:
    """The name of a job whose first attempt stands in its status."""
    name = jobs.a_job(workers={"replicas": 1}, storage={"claimName": "mine"})
    assert jobs.patch(name, {"status": {"attempt": 1}}, "/status")["status"]["attempt"] == 1
    return name


def test_every_part_of_the_spec_is_either_frozen_or_free(jobs: Jobs) -> None:
    parts = {f"spec.{field.alias}" for field in JobSpec.model_fields.values()} - {"spec.runPolicy"}
    parts |= {f"spec.runPolicy.{field.alias}" for field in RunPolicy.model_fields.values()}
    assert parts == {part_of(change) for change in FREE} | set(FROZEN)
    assert set(FROZEN) == {part for rule in FREEZE_RULES for part in rule.parts}


@pytest.mark.parametrize("path", FROZEN)
def test_a_job_that_has_run_is_frozen(jobs: Jobs, begun: str, path: str) -> None:
    at, sentence = "spec", f"`{path}` may not change once the job has run"
    if path == "spec.managedBy":
        at, sentence = path, f"`{path}` may never change: create another job"
    elif path in ("spec.workers", "spec.parameterServers"):
        sentence += ", but while it is Suspended: set `spec.suspend` first"
    else:
        sentence += (
            ": create another job, which resumes from the checkpoints of this one if `training.checkpoint.folder`"
            " names their folder"
        )
    assert (at, sentence) in causes(jobs.patch(begun, {"spec": FROZEN[path]}))


WORKERS, SERVERS = "workers", "parameterServers"
IDLE: dict[str, Raw] = {
    "other nodes": {"template": {"spec": {"nodeSelector": {"pool": "b"}, "tolerations": [{"operator": "Exists"}]}}},
    "labels": {"template": {"metadata": {"labels": {"team": "b"}, "annotations": {"a": "b"}}}},
    "another size": {"replicas": 3},
    "more memory": {"resources": {"limits": {"memory": "64Gi"}}},
}


@pytest.mark.parametrize("role", [WORKERS, SERVERS])
@pytest.mark.parametrize("change", IDLE.values(), ids=IDLE)
def test_pods_may_become_others_while_their_job_is_suspended(jobs: Jobs, role: str, change: Raw) -> None:
    pods = {"image": "an/image:1"}
    name = jobs.a_job(training=None, workers=pods, parameterServers=pods)
    jobs.patch(name, {"status": {"attempt": 1, "phase": "Running"}}, "/status")
    changed = {"spec": {role: change}}
    (refused,) = causes(jobs.patch(name, changed))
    assert refused == (
        "spec",
        f"`spec.{role}` may not change once the job has run, but while it is Suspended: set `spec.suspend` first",
    )
    jobs.patch(name, {"spec": {"suspend": True}})
    jobs.patch(name, {"status": {"phase": "Suspending"}}, "/status")
    assert causes(jobs.patch(name, changed)) == [refused]
    jobs.patch(name, {"status": {"phase": "Suspended"}}, "/status")
    # With another part nothing changes, and that part is named.
    both = jobs.patch(name, {"spec": {role: change, "storage": {"claimName": "another"}}})
    assert [message.partition(" ")[0] for _, message in causes(both)] == ["`spec.storage`"]
    stored = jobs.patch(name, {"spec": {role: change, "suspend": False}})["spec"]
    assert merge(stored[role], change) == stored[role]
    # It goes on; the phase is the operator's to write.
    assert causes(jobs.patch(name, {"spec": {role: {"replicas": 7}}})) == [refused]


def test_servers_come_and_go_while_a_job_is_suspended(jobs: Jobs) -> None:
    servers = {"image": "an/image:1"}
    name = jobs.a_job(training=None, workers={"image": "an/image:1"}, suspend=True)
    jobs.patch(name, {"status": {"attempt": 1, "phase": "Suspended"}}, "/status")
    assert jobs.patch(name, {"spec": {"parameterServers": servers}})["spec"]["parameterServers"]["replicas"] == 1
    assert "parameterServers" not in jobs.patch(name, {"spec": {"parameterServers": None}})["spec"]
    jobs.patch(name, {"spec": {"suspend": False}})
    refused = jobs.patch(name, {"spec": {"parameterServers": servers}})
    assert [message.partition(" ")[0] for _, message in causes(refused)] == ["`spec.parameterServers`"]


def test_a_training_gets_no_servers_while_it_is_suspended_since_its_mode_stays(jobs: Jobs) -> None:
    name = jobs.a_job(suspend=True)
    jobs.patch(name, {"status": {"attempt": 1, "phase": "Suspended"}}, "/status")
    refused = jobs.patch(name, {"spec": {"parameterServers": {}}})
    assert any("ParameterServer" in message for _, message in causes(refused))
    mode = {"dataParallel": {"mode": "ParameterServer"}}
    both = jobs.patch(name, {"spec": {"parameterServers": {}, "parallelism": mode}})
    assert [message.partition(" ")[0] for _, message in causes(both)] == ["`spec.parallelism`"]


def test_a_frozen_part_does_not_change_beside_a_status(jobs: Jobs, begun: str) -> None:
    refused = jobs.patch(begun, {"spec": FROZEN["spec.storage"], "status": {"attempt": 0, "phase": "Pending"}})
    assert any("`spec.storage` may not change" in message for _, message in causes(refused))
    written = jobs.patch(begun, {"spec": FROZEN["spec.storage"], "status": {"phase": "Running"}}, "/status")
    assert written["spec"]["storage"]["claimName"] == "mine"
    assert written["status"]["phase"] == "Running"


@pytest.mark.parametrize("change", FREE, ids=part_of)
def test_a_job_that_has_run_can_still_be_stopped(jobs: Jobs, begun: str, change: Raw) -> None:
    changed = jobs.patch(begun, {"spec": change})["spec"]
    for part, value in change.items():
        assert changed[part] | value == changed[part] if isinstance(value, dict) else changed[part] == value


def test_a_job_that_has_not_run_may_change(jobs: Jobs) -> None:
    name = jobs.a_job(suspend=True)
    jobs.patch(name, {"status": {"attempt": 0}}, "/status")
    assert jobs.patch(name, {"spec": {"training": {"steps": 7}}})["spec"]["training"]["steps"] == 7


@pytest.mark.parametrize(
    ("first", "then"), [("a.example/b", None), (None, "a.example/b"), ("a.example/b", "c.example/d")]
)
def test_who_manages_a_job_never_changes_not_even_before_it_has_run(jobs, first, then):
    name = jobs.a_job(suspend=True, **({"managedBy": first} if first else {}))
    refused = jobs.patch(name, {"spec": {"managedBy": then}})
    message = "`spec.managedBy` may never change: create another job"
    assert causes(refused) == [("spec.managedBy", message)]


def test_no_scaling_is_offered_while_a_job_that_has_begun_keeps_its_size(jobs: Jobs, begun: str) -> None:
    served = json.loads(jobs.output("get", "--raw", "/apis/disttrain.io/v1alpha1"))["resources"]
    assert {entry["name"] for entry in served} == {"disttrainingjobs", "disttrainingjobs/status"}
    assert "NotFound" in jobs.kubectl("scale", "dtj", begun, "--replicas=3").stderr
    refused = jobs.patch(begun, {"spec": {"workers": {"replicas": 3}}})
    assert "`spec.workers` may not change once the job has run, but while it is Suspended" in refused["message"]


def test_status_and_spec_are_written_apart(jobs: Jobs) -> None:
    name = jobs.a_job()
    jobs.patch(name, {"status": {"attempt": 1, "phase": "Running"}})
    assert "status" not in jobs.get(name)


def test_items_of_status_lists_are_found_by_their_keys(jobs: Jobs) -> None:
    name = jobs.a_job()
    twice = [{"number": 1, "startTime": "2026-01-01T00:00:00Z"}] * 2
    assert [field for field, _ in causes(jobs.patch(name, {"status": {"attempts": twice}}, "/status"))] == [
        "status.attempts[1]"
    ]


def test_the_columns_say_how_a_job_goes(jobs: Jobs) -> None:
    name = jobs.a_job()
    condition = {"type": "Running", "status": "True", "reason": "AllPodsRunning", "message": "all 2 pods run"}
    condition |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    status = {
        "phase": "Running",
        "conditions": [condition],
        "mesh": "dp2",
        "ready": "2/2",
        "restarts": 1,
        "progress": {
            "step": 40,
            "totalSteps": 100,
            "loss": 0.25,
            "remaining": "9m",
            "updateTime": "2026-01-01T00:00:00Z",
        },
    }
    assert "status" in jobs.patch(name, {"status": status}, "/status")
    header, row = jobs.output("get", "dtj", name).splitlines()
    assert header.split() == ["NAME", "PHASE", "REASON", "READY", "ETA", "RESTARTS", "AGE"]
    assert row.split()[:-1] == [name, "Running", "AllPodsRunning", "2/2", "9m", "1"]
    header, row = jobs.output("get", "dtj", name, "-o", "wide").splitlines()
    assert header.split()[-3:] == ["MESH", "STEP", "LOSS"]
    assert row.split()[-3:] == ["dp2", "40", "0.25"]


def test_jobs_have_a_category_of_their_own_and_are_not_deleted_with_all(jobs: Jobs) -> None:
    name = jobs.a_job()
    assert name in jobs.output("get", "disttrain")
    assert name not in jobs.output("get", "all")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("dtj.spec.workers.gpusPerPod", "GPUs of each pod; only this field requests them."),
        ("dtj.spec.training.globalBatchSize", "Samples of all ranks in one optimizer step."),
        ("dtj.spec.suspend", "True stops the pods after a checkpoint"),
        ("dtj.status.conditions", "Wait for `Finished`"),
    ],
)
def test_kubectl_explains_our_fields(jobs: Jobs, path: str, text: str) -> None:
    assert text in " ".join(jobs.output("explain", path).split())


def test_kubectl_knows_the_fields_of_a_template(jobs: Jobs) -> None:
    assert "livenessProbe" in jobs.output("explain", "dtj.spec.workers.template.spec.containers")
