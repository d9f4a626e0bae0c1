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
from disttrain_api.rules import RULES
from disttrain_api.spec import DistTrainingJob
from disttrain_api.structural import with_defaults
from tests.builders import a_manifest
from tests.documented import documented_jobs
from tests.refusals import ACCEPTED, NAME_REFUSALS, REFUSALS, Refusal
from tests.waiting import GENEROUS
from tools.cluster.api import wait_for
from tools.cluster.build import path_of
from tools.cluster.control_plane import ControlPlane
from tools.cluster.paths import REPOSITORY

CRD = REPOSITORY / "crds" / "disttrain.io_disttrainingjobs.yaml"
EVERY_FIELD = Path(__file__).with_name("every_field.yaml")
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
JOBS = "/apis/disttrain.io/v1alpha1/namespaces/default/disttrainingjobs"

CPU = "spec.workers.resources.limits.cpu"

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


def test_the_api_server_checks_every_rule() -> None:
    assert [rule.id for rule in RULES if not rule.cel] == []


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.rule)
def test_a_broken_rule_is_refused_with_the_words_of_python(jobs: Jobs, refusal: Refusal) -> None:
    found = causes(jobs.create(refusal.manifest, dry_run=True))
    assert (refusal.path, refusal.message) in found
    assert len(found) == 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("[a", "missing closing ]"),
        ("(?=a)", "invalid or unsupported Perl syntax"),
        (r"(a)\1", "invalid escape sequence"),
    ],
)
def test_an_expression_that_is_none_is_refused_with_the_reason_before_the_words_of_python(jobs, pattern, why):
    rules = [{"pattern": "(?P<step>.)"}, {"pattern": f"(?P<loss>.){pattern}"}]
    workers = {"image": "an/image:1", "command": ["train"]}
    job = a_manifest("refused", training=None, workers=workers, progress={"totalSteps": 9, "logRules": rules})
    ((path, said),) = causes(jobs.create(job, dry_run=True))
    (problem,) = problems(job)
    (sentence,) = (rule.sentence for rule in RULES if rule.id == "LogRulePattern")
    assert (path, problem.path) == ("spec.progress", "spec.progress.logRules")
    assert str(problem).startswith(f"{problem.path}: {sentence}; `logRules[1].pattern` is ")
    assert why in said
    assert said.endswith(f"evaluating rule: {sentence}")


@pytest.mark.parametrize(("name", "message"), NAME_REFUSALS.items())
def test_a_name_is_refused_with_the_words_of_python(jobs: Jobs, name: str, message: str) -> None:
    assert causes(jobs.create(a_manifest(name), dry_run=True)) == [("metadata.name", message)]


@pytest.mark.parametrize("spec", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_breaks_no_rule_is_stored(jobs: Jobs, spec: dict[str, Any]) -> None:
    assert jobs.create(a_manifest(**spec), dry_run=True)["kind"] == "DistTrainingJob"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"workers": {"replica": 2}}, 'unknown field "spec.workers.replica"'),
        ({"training": {"steps": 1, "lerningRate": 1}}, 'unknown field "spec.training.lerningRate"'),
        (
            {"workers": {"template": {"spec": {"containers": [{"name": "trainer", "imgae": "x"}]}}}},
            'unknown field "spec.workers.template.spec.containers[0].imgae"',
        ),
    ],
)
def test_kubectl_apply_refuses_a_misspelt_field(jobs: Jobs, spec: dict[str, Any], sentence: str) -> None:
    done = jobs.kubectl("apply", "-f", "-", text=json.dumps(a_manifest("misspelt", **spec)))
    assert done.returncode != 0
    assert sentence in done.stderr


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
        *(({"workers": {"resources": {"limits": {"cpu": size}}}}, CPU) for size in ("x", 0.5, True, {})),
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
    exchange = {"mode": "AllReduce", "allReduce": "Backend", "syncBatchNorm": False}
    searched = {"staticGraph": False, "findUnusedParameters": False}
    assert spec["parallelism"] == {"dataParallel": exchange | searched}
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
