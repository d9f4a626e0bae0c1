"""The CustomResourceDefinition on a real API server: it refuses what Python refuses, and stores what Python reads."""

import json
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from disttrain_api import ManifestError, manifest, problems
from disttrain_api.pod_template import pod_template_schema
from disttrain_api.rules import FREEZE_RULES, RULES
from disttrain_api.run_policy import RunPolicy
from disttrain_api.spec import DistTrainingJob, JobSpec
from disttrain_api.structural import with_defaults
from tests.builders import a_manifest
from tests.cluster.api import wait_for
from tests.cluster.build import path_of
from tests.cluster.control_plane import ControlPlane
from tests.cluster.paths import REPOSITORY
from tests.documented import documented_jobs
from tests.refusals import ACCEPTED, NAME_REFUSALS, REFUSALS, Refusal
from tests.waiting import GENEROUS

CRD = REPOSITORY / "crds" / "disttrain.io_disttrainingjobs.yaml"
EVERY_FIELD = Path(__file__).with_name("every_field.yaml")
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
JOBS = "/apis/disttrain.io/v1alpha1/namespaces/default/disttrainingjobs"

Raw = dict[str, Any]


class Jobs:
    """DistTrainingJobs on an API server, by kubectl and by plain requests."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._api = control_plane.api
        self._kubeconfig = control_plane.kubeconfig
        self._program = path_of("kubectl")

    def kubectl(self, *arguments: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        command = [str(self._program), "--kubeconfig", str(self._kubeconfig), *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=GENEROUS)

    def output(self, *arguments: str, text: str | None = None) -> str:
        done = self.kubectl(*arguments, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def create(self, job: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
        """The answer: the stored job, or a Status that says why not."""
        dry = "&dryRun=All" if dry_run else ""
        answer: Raw = self._api.ask("POST", f"{JOBS}?fieldValidation=Strict{dry}", job).json()
        return answer

    def patch(self, name: str, change: Mapping[str, Any], subresource: str = "") -> Raw:
        answer: Raw = self._api.ask("PATCH", f"{JOBS}/{name}{subresource}", change).json()
        return answer

    def get(self, name: str) -> Raw:
        answer: Raw = self._api.get(f"{JOBS}/{name}")
        return answer

    def delete(self, name: str) -> None:
        assert self._api.ask("DELETE", f"{JOBS}/{name}").status == 200

    def a_job(self, **spec: Any) -> str:
        """The name of a new stored job."""
        name = f"job-{uuid.uuid4().hex[:8]}"
        stored = self.create(a_manifest(name, **spec))
        assert stored["kind"] == "DistTrainingJob", stored
        return name


def causes(answer: Raw) -> list[tuple[str, str]]:
    """(field, sentence) of everything that the API server has against a job."""
    assert answer["kind"] == "Status", "the API server took it"
    return [(cause["field"], cause["message"].removeprefix("Forbidden: ")) for cause in answer["details"]["causes"]]


@pytest.fixture(scope="module")
def jobs(api_server: ControlPlane) -> Jobs:
    """The definition, applied the way users do it; that alone is a test of its size and of its rules' cost."""
    jobs = Jobs(api_server)
    jobs.output("apply", "-f", str(CRD))
    # Served, and in the documents that `kubectl explain` reads.
    wait_for(lambda: jobs.kubectl("get", "dtj").returncode == 0, 30, lambda: "jobs are not served")
    wait_for(lambda: jobs.kubectl("explain", "dtj").returncode == 0, 30, lambda: "jobs are not explained")
    return jobs


def test_the_definition_is_applied_again_without_a_change(jobs: Jobs) -> None:
    assert "unchanged" in jobs.output("apply", "-f", str(CRD))


# --- refusals ---


def test_what_the_api_server_cannot_check_is_named_with_its_reason() -> None:
    assert {rule.id: rule.python_only for rule in RULES if rule.cel is None} == {}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.rule)
def test_a_broken_rule_is_refused_with_the_words_of_python(jobs: Jobs, refusal: Refusal) -> None:
    found = causes(jobs.create(refusal.manifest, dry_run=True))
    assert (refusal.path, refusal.message) in found
    assert len(found) == 1


@pytest.mark.parametrize(("name", "message"), NAME_REFUSALS.items())
def test_a_name_is_refused_with_the_words_of_python(jobs: Jobs, name: str, message: str) -> None:
    assert causes(jobs.create(a_manifest(name), dry_run=True)) == [("metadata.name", message)]


@pytest.mark.parametrize("spec", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_breaks_no_rule_is_stored(jobs: Jobs, spec: dict[str, Any]) -> None:
    assert jobs.create(a_manifest(**spec), dry_run=True)["kind"] == "DistTrainingJob"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"workers": {"replica": 2}}, 'unknown field "spec.workers.replica"'),
        ({"training": {"steps": 1, "lerningRate": 1}}, 'unknown field "spec.training.lerningRate"'),
        (
            {"workers": {"template": {"spec": {"containers": [{"name": "trainer", "imgae": "x"}]}}}},
            'unknown field "spec.workers.template.spec.containers[0].imgae"',
        ),
    ],
)
def test_kubectl_apply_refuses_a_misspelt_field(jobs: Jobs, spec: dict[str, Any], said: str) -> None:
    done = jobs.kubectl("apply", "-f", "-", text=json.dumps(a_manifest("misspelt", **spec)))
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"workers": {"replicas": "2"}}, "spec.workers.replicas"),
        ({"workers": {"replicas": 0}}, "spec.workers.replicas"),
        ({"suspend": "yes"}, "spec.suspend"),
        ({"training": {"optimizer": {"learningRate": 0}}}, "spec.training.optimizer.learningRate"),
        ({"training": {"precision": "fp16"}}, "spec.training.precision"),
        ({"storage": {"url": "0Gi"}}, "spec.storage.url"),
        ({"workers": {"template": {"spec": {"containers": "x"}}}}, "spec.workers.template.spec.containers"),
        (
            {"workers": {"template": {"metadata": {"labels": {f"l{number}": "x" for number in range(257)}}}}},
            "spec.workers.template.metadata.labels",
        ),
        (
            {"workers": {"template": {"spec": {"containers": [{"name": "a", "resources": {"limits": {"cpu": "x"}}}]}}}},
            "spec.workers.template.spec.containers[0].resources.limits.cpu",
        ),
    ],
)
def test_a_wrong_value_is_refused_at_the_same_place_as_by_python(jobs: Jobs, spec: dict[str, Any], path: str) -> None:
    job = a_manifest(**spec)
    assert path in {found.path for found in problems(job)}
    assert path in {field for field, _ in causes(jobs.create(job, dry_run=True))}


# --- what is stored ---


def as_stored(job: DistTrainingJob) -> Raw:
    """The spec as the API server is to store it: what was read, with the defaults of models and pod templates."""
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for role in ("workers", "parameterServers"):
        if role in spec:
            spec[role]["template"] = with_defaults(spec[role]["template"], pod_template_schema())
    return spec


@pytest.mark.parametrize(("page", "text"), documented_jobs())
def test_every_job_of_the_documentation_is_accepted(jobs: Jobs, page: str, text: str) -> None:
    applied = jobs.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert applied.returncode == 0, f"{page}: {applied.stderr}"
    assert manifest.parse(text).kind == "DistTrainingJob"


@pytest.mark.parametrize("path", [EVERY_FIELD, *EXAMPLES], ids=lambda path: path.stem)
def test_what_kubectl_stores_is_what_python_reads(jobs: Jobs, path: Path) -> None:
    job = manifest.load(path)
    jobs.output("apply", "-f", str(path))
    try:
        assert jobs.get(job.metadata.name)["spec"] == as_stored(job)
    finally:
        jobs.delete(job.metadata.name)


def test_defaults_are_visible_in_the_stored_job(jobs: Jobs) -> None:
    spec = jobs.get(jobs.a_job(workers={"replicas": None}))["spec"]
    assert spec["workers"] == {"replicas": 1, "gpuResource": "nvidia.com/gpu", "template": {}}
    exchange = {"mode": "AllReduce", "allReduce": "Backend", "syncBatchNorm": False, "staticGraph": False}
    assert spec["parallelism"] == {"dataParallel": exchange}
    assert spec["runPolicy"]["maxRestarts"] == 3
    decay = {"weightDecay": 0, "weightDecayOn": "All", "groups": []}
    assert spec["training"]["optimizer"] == {"name": "AdamW", "learningRate": 0.001, **decay}


@pytest.mark.parametrize("number", ["3e-4", "1.5e-7", "0.0003", "3.0e-4"])
def test_kubectl_reads_a_learning_rate_as_a_number(jobs: Jobs, number: str) -> None:
    text = as_yaml(a_manifest("rate", training={"optimizer": {"learningRate": 77}}), number)
    stored = json.loads(jobs.output("create", "--dry-run=server", "-o", "json", "-f", "-", text=text))
    assert stored["spec"]["training"]["optimizer"]["learningRate"] == float(number)
    assert manifest.parse(text).spec.training.optimizer.learning_rate == float(number)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("word", "stored"),
    [
        ("on", True),
        ("no", False),
        ("y", True),
        ("012", 10),
        ("1_000", 1000),
        ("0b11", 3),
        ("-0x1F", -31),
        ("1e400", "1e400"),
        ("18446744073709551616", 18446744073709552000),
    ],
)
def test_words_that_kubectl_reads_otherwise_are_refused(jobs: Jobs, word: str, stored: object) -> None:
    """Else one file would be two jobs: to YAML 1.2 each of these is another string or number than to kubectl."""
    code = {"name": None, "entrypoint": "mine:build"}
    text = as_yaml(a_manifest("words", training={"model": code | {"config": {"it": 77}}, "data": code}), word)
    job = json.loads(jobs.output("create", "--dry-run=server", "-o", "json", "-f", "-", text=text))
    assert job["spec"]["training"]["model"]["config"]["it"] == stored
    with pytest.raises(ManifestError, match=r"^words\.yaml:2: "):
        manifest.parse(text, source="words.yaml")


def as_yaml(job: Raw, word: str) -> str:
    """The job with `word` in place of 77, so that nobody takes the text for JSON."""
    return f"# A job.\n{json.dumps(job)}".replace("77", word)


# --- the life of a stored job ---

FREE = (
    {"suspend": True},
    {"runPolicy": {"activeDeadlineSeconds": 60}},
    {"runPolicy": {"progressDeadlineSeconds": 600}},
    {"runPolicy": {"startingDeadlineSeconds": 60}},
    {"runPolicy": {"terminationTimeoutSeconds": 5}},
    {"runPolicy": {"ttlSecondsAfterFinished": 60}},
    {"runPolicy": {"failureLogInStatus": True}},
    {"runPolicy": {"podSecurity": "Template"}},
)
FROZEN: dict[str, Raw] = {
    "spec.workers": {"workers": {"replicas": 3}},
    "spec.parameterServers": {"training": None, "parameterServers": {"template": {}}},
    "spec.parallelism": {"parallelism": {"dataParallelReplicateDegree": 2}},
    "spec.training": {"training": {"steps": 7}},
    "spec.storage": {"storage": {"claimName": "another"}},
    "spec.runPolicy.restartPolicy": {"runPolicy": {"restartPolicy": "Never"}},
    "spec.runPolicy.maxRestarts": {"runPolicy": {"maxRestarts": 9}},
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
    name = jobs.a_job(storage={"claimName": "mine"})
    assert jobs.patch(name, {"status": {"attempt": 1}}, "/status")["status"]["attempt"] == 1
    return name


def test_every_part_of_the_spec_is_either_frozen_or_free(jobs: Jobs) -> None:
    parts = {f"spec.{field.alias}" for field in JobSpec.model_fields.values()} - {"spec.runPolicy"}
    parts |= {f"spec.runPolicy.{field.alias}" for field in RunPolicy.model_fields.values()}
    assert parts == {part_of(change) for change in FREE} | set(FROZEN)
    assert set(FROZEN) == {part for rule in FREEZE_RULES for part in rule.parts}


@pytest.mark.parametrize("path", FROZEN)
def test_a_job_that_has_run_is_frozen(jobs: Jobs, begun: str, path: str) -> None:
    at, when = "spec", "may not change once the job has run"
    if path == "spec.managedBy":
        at, when = path, "may never change"
    message = f"`{path}` {when}: delete the job and make it again"
    assert (at, message) in causes(jobs.patch(begun, {"spec": FROZEN[path]}))


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
def test_who_manages_a_job_never_changes_not_even_before_it_has_run(
    jobs: Jobs, first: str | None, then: str | None
) -> None:
    name = jobs.a_job(suspend=True, **({"managedBy": first} if first else {}))
    refused = jobs.patch(name, {"spec": {"managedBy": then}})
    message = "`spec.managedBy` may never change: delete the job and make it again"
    assert causes(refused) == [("spec.managedBy", message)]


def test_no_scaling_is_offered_while_a_job_that_has_begun_keeps_its_size(jobs: Jobs, begun: str) -> None:
    served = json.loads(jobs.output("get", "--raw", "/apis/disttrain.io/v1alpha1"))["resources"]
    assert {entry["name"] for entry in served} == {"disttrainingjobs", "disttrainingjobs/status"}
    assert "NotFound" in jobs.kubectl("scale", "dtj", begun, "--replicas=3").stderr
    refused = jobs.patch(begun, {"spec": {"workers": {"replicas": 3}}})
    assert "delete the job and make it again" in refused["message"]


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
    status = {
        "phase": "Running",
        "mesh": "dp2",
        "ready": "2/2",
        "restarts": 1,
        "progress": {"step": 40, "totalSteps": 100, "loss": 0.25, "updateTime": "2026-01-01T00:00:00Z"},
    }
    assert "status" in jobs.patch(name, {"status": status}, "/status")
    header, row = jobs.output("get", "dtj", name).splitlines()
    assert header.split() == ["NAME", "PHASE", "MESH", "READY", "STEP", "LOSS", "ETA", "RESTARTS", "AGE"]
    assert row.split()[:-1] == [name, "Running", "dp2", "2/2", "40", "0.25", "1"]


def test_jobs_are_listed_among_all(jobs: Jobs) -> None:
    name = jobs.a_job()
    assert name in jobs.output("get", "all")
    assert name in jobs.output("get", "disttrain")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("dtj.spec.workers.gpusPerPod", "GPUs of each pod; the only way to ask for them."),
        ("dtj.spec.training.globalBatchSize", "Samples of all ranks in one optimizer step."),
        ("dtj.spec.suspend", "True stops the pods after a checkpoint"),
        ("dtj.status.conditions", "wait for `Finished`"),
    ],
)
def test_kubectl_explains_our_fields(jobs: Jobs, path: str, words: str) -> None:
    assert words in " ".join(jobs.output("explain", path).split())


def test_kubectl_knows_the_fields_of_a_template(jobs: Jobs) -> None:
    assert "livenessProbe" in jobs.output("explain", "dtj.spec.workers.template.spec.containers")
