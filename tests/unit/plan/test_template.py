"""What a pod template says beside the operator's defaults: which of the two wins."""

from dataclasses import replace

import pytest

from disttrain_api.names import Env, Role
from disttrain_operator.plan.desired import Loopback, PodDefaults, default_environment, pod, secret
from tests.builders import a_claim_template, a_job
from tests.unit.plan.test_pods import SITE, command_template, environment

GIVEN = [{"secretRef": {"name": "team"}}, {"configMapRef": {"name": "site", "optional": True}}]
DEFAULTS = {
    "HOME",
    "USER",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "PYTHONUNBUFFERED",
}


def test_what_a_template_says_wins_over_the_defaults() -> None:
    template = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "x"}},
        "spec": {
            "securityContext": {"runAsUser": 1000},
            "terminationGracePeriodSeconds": 300,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {"name": "sidecar", "image": "s:1"},
                {
                    "name": "trainer",
                    "env": [{"name": "HOME", "value": "/home/me"}],
                    "volumeMounts": [{"name": "fast", "mountPath": "/dev/shm"}],
                },
            ],
            "volumes": [{"name": "fast", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        },
    }
    manifest = pod(a_job(workers={"template": template}), Role.WORKER, 0, 1, SITE)
    spec = manifest["spec"]
    assert manifest["metadata"]["labels"]["team"] == "vision"
    assert manifest["metadata"]["annotations"] == {"note": "x"}
    assert [container["name"] for container in spec["containers"]] == ["trainer", "sidecar"]
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["fsGroup"] == 65532
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert environment(manifest)["HOME"] == "/home/me"
    assert environment(manifest)["DISTTRAIN_GRACE_SECONDS"] == "300"
    mounts = [mount["name"] for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert mounts == ["fast"]


def test_the_last_words_of_containers_before_the_program_are_kept() -> None:
    init_containers = [{"name": "fetch", "image": "x"}, {"name": "own", "terminationMessagePolicy": "File"}]
    manifest = pod(a_job(workers={"template": {"spec": {"initContainers": init_containers}}}), Role.WORKER, 0, 1, SITE)
    containers = [*manifest["spec"]["initContainers"], manifest["spec"]["containers"][0]]
    policies = {entry["name"]: entry["terminationMessagePolicy"] for entry in containers}
    assert policies == {"fetch": "FallbackToLogsOnError", "own": "File", "trainer": "FallbackToLogsOnError"}


def test_temporary_files_have_a_place_that_is_there_and_can_be_written_under_a_read_only_root() -> None:
    read_only = {"securityContext": {"readOnlyRootFilesystem": True}}
    job = a_job(training=None, workers={"template": command_template(**read_only)})
    manifest = pod(job, Role.WORKER, 0, 1, SITE)
    mounts = {mount["mountPath"]: mount["name"] for mount in manifest["spec"]["containers"][0]["volumeMounts"]}
    assert mounts[environment(manifest)["TMPDIR"]] == "disttrain-scratch", "no folder below it: nobody has made one yet"
    chosen = command_template(env=[{"name": "TMPDIR", "value": "/fast"}])
    job = a_job(training=None, workers={"template": chosen})
    assert environment(pod(job, Role.WORKER, 0, 1, SITE))["TMPDIR"] == "/fast"


@pytest.mark.parametrize(
    "workers",
    [{"envFrom": GIVEN}, {"template": {"spec": {"containers": [{"name": "trainer", "envFrom": GIVEN}]}}}],
    ids=["beside", "template"],
)
def test_defaults_stand_before_a_templates_secrets_so_that_these_win(workers):
    job = a_job(workers=workers, parameterServers={}, parallelism={"dataParallel": {"mode": "ParameterServer"}})
    defaults = default_environment(job, SITE)
    trainer = pod(job, Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]
    assert trainer["envFrom"] == [{"secretRef": {"name": defaults["metadata"]["name"]}}, *GIVEN]
    names = {entry["name"] for entry in trainer["env"]}
    assert not names & DEFAULTS, "what stands in `env` wins over all of `envFrom`"
    assert names >= {Env.SCRATCH, Env.MASTER_ADDR, Env.WORLD_SIZE}, "the contract still does"
    server = pod(job, Role.PS, 0, 1, SITE)
    assert environment(server).keys() >= DEFAULTS, "a role without `envFrom` needs no Secret"
    assert defaults["stringData"] == {name: environment(server)[name] for name in DEFAULTS}
    assert (defaults["kind"], defaults["immutable"]) == ("Secret", True)
    assert defaults["metadata"]["ownerReferences"] == secret(job, SITE)["metadata"]["ownerReferences"]
    assert defaults["metadata"]["name"] not in {secret(job, SITE)["metadata"]["name"], "team"}
    others = default_environment(job, replace(SITE, token="other"))
    assert others["metadata"]["name"] != defaults["metadata"]["name"], "nobody knows it who does not know the token"


def test_what_a_template_sets_itself_wins_over_defaults_and_secrets_alike() -> None:
    own = {"name": "HOME", "value": "/home/me"}
    job = a_job(workers={"envFrom": GIVEN, "env": [own]})
    trainer = pod(job, Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]
    assert own in trainer["env"]


def test_without_secrets_there_are_no_defaults_to_be_made() -> None:
    assert default_environment(a_job(), SITE) is None
    assert default_environment(a_job(workers={"envFrom": []}), SITE) is None
    sidecar = {"template": {"spec": {"containers": [{"name": "other", "image": "x", "envFrom": GIVEN}]}}}
    assert default_environment(a_job(workers=sidecar), SITE) is None
    assert "envFrom" not in pod(a_job(), Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]


def test_a_process_of_this_machine_which_reads_no_secret_has_its_defaults_at_once() -> None:
    job, site = a_job(workers={"envFrom": GIVEN}), replace(SITE, loopback=Loopback(29500))
    assert default_environment(job, site) is None
    manifest = pod(job, Role.WORKER, 0, 1, site)
    assert environment(manifest).keys() >= DEFAULTS
    assert manifest["spec"]["containers"][0]["envFrom"] == GIVEN


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("/dev/shm/", "/dev/shm"),
        ("/scratch//", "/scratch"),
        ("/checkpoints/.", "/checkpoints"),
        ("//checkpoints", "/checkpoints"),
        ("dev/shm", "/dev/shm"),
        ("/data/../scratch", "/scratch"),
    ],
)
def test_a_volume_of_the_templates_is_the_only_one_at_its_place_however_that_is_written(given: str, place: str) -> None:
    container = {"name": "trainer", "volumeMounts": [{"name": "own", "mountPath": given}]}
    template = {"spec": {"containers": [container], "volumes": [{"name": "own", "emptyDir": {}}]}}
    job = a_job(workers={"template": template}, storage=a_claim_template())
    mounts = pod(job, Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]["volumeMounts"]
    assert mounts[0] == {"name": "own", "mountPath": given}, "as it was given"
    others = {"/etc/disttrain", "/scratch", "/dev/shm", "/checkpoints"} - {place}
    assert {mount["mountPath"] for mount in mounts[1:]} == others


def test_a_volume_beside_or_below_one_of_the_operators_takes_no_place() -> None:
    paths = ["/scratch/cache", "/dev", "/checkpoints2", "/scratch/..", "/"]
    given = [{"name": "own", "mountPath": path} for path in paths]
    template = {"spec": {"containers": [{"name": "trainer", "volumeMounts": given}]}}
    job = a_job(workers={"template": template}, storage=a_claim_template())
    mounts = pod(job, Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]["volumeMounts"]
    assert len(mounts) == len(given) + 4


def test_users_and_groups_can_be_left_to_the_cluster_and_the_rest_is_restricted_still() -> None:
    site = replace(SITE, defaults=PodDefaults(user_id=None))
    spec = pod(a_job(), Role.WORKER, 0, 1, site)["spec"]
    kept = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert {key: spec["securityContext"].get(key) for key in kept} == kept
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys()
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    own = {"spec": {"securityContext": {"fsGroup": 7}}}
    spec = pod(a_job(workers={"template": own}), Role.WORKER, 0, 1, site)["spec"]
    assert spec["securityContext"]["fsGroup"] == 7
    assert "runAsUser" not in spec["securityContext"]
