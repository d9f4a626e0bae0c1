"""What an attempt's objects look like."""

import json
from dataclasses import replace
from typing import Any

import pytest

from disttrain_api.jobconfig import JobConfig
from disttrain_api.names import Env, Label, Role
from disttrain_operator.plan.desired import (
    GangPlan,
    Loopback,
    PodDefaults,
    Site,
    claim,
    network_policy,
    pod,
    secret,
    service,
)
from disttrain_operator.plan.identity import pod_name
from disttrain_operator.plan.ranks_probe import asks_for_ranks
from disttrain_operator.plan.site import OperatorPods, PlannedJob
from tests.builders import UID, a_claim_template, a_job, merge

SITE = Site(trainer_image="disttrain/trainer:test", token="a-token")


OWN_PROGRAM: dict[str, Any] = {
    "training": None,
    "workers": {"template": {"spec": {"containers": [{"name": "trainer", "image": "mine:1", "command": ["x"]}]}}},
}


def environment(manifest: dict[str, Any]) -> dict[str, str]:
    """The trainer's environment; a name that stands twice fails the test."""
    entries = manifest["spec"]["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names))
    return {entry["name"]: entry["value"] for entry in entries}


def command_template(**container: Any) -> dict[str, Any]:
    return {
        "spec": {"containers": [{"name": "trainer", "image": "mine:1", "command": ["torchrun", "x.py"], **container}]}
    }


def test_a_worker_of_several_ranks_gets_torchruns_settings_but_no_rank_of_its_own() -> None:
    job = a_job(workers={"replicas": 4, "processesPerPod": 8})
    found = environment(pod(job, Role.WORKER, 3, 2, SITE))
    assert found["WORLD_SIZE"] == "32"
    assert found["LOCAL_WORLD_SIZE"] == "8"
    assert found["NODE_RANK"] == found["GROUP_RANK"] == found["PET_NODE_RANK"] == "3"
    assert found["PET_NNODES"] == "4"
    assert found["PET_NPROC_PER_NODE"] == "8"
    assert found["MASTER_ADDR"] == found["PET_MASTER_ADDR"] == "digits-3f9a1-worker-0-a2.digits-3f9a1"
    assert found["MASTER_PORT"] == found["PET_MASTER_PORT"] == "29500"
    assert found["PET_RDZV_ID"] == f"{UID}-2"
    assert "RANK" not in found
    assert "LOCAL_RANK" not in found


def test_a_worker_of_one_rank_has_it_in_its_environment() -> None:
    found = environment(pod(a_job(), Role.WORKER, 1, 1, SITE))
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("1", "0", "2")


def test_a_rank_without_peers_has_none_in_its_environment() -> None:
    job = a_job(training=None, workers={"replicas": 1, "template": command_template()})
    found = environment(pod(job, Role.WORKER, 0, 1, SITE))
    assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == found["PET_NNODES"] == "1", (
        "what torchrun needs is there"
    )
    assert not {"RANK", "LOCAL_RANK"} & found.keys()


def test_the_master_has_the_name_that_its_peers_get() -> None:
    job = a_job()
    master = pod(job, Role.WORKER, 0, 1, SITE)
    value = environment(pod(job, Role.WORKER, 1, 1, SITE))["MASTER_ADDR"]
    assert value == f"{master['spec']['hostname']}.{master['spec']['subdomain']}"
    assert master["spec"]["subdomain"] == service(job, SITE)["metadata"]["name"]
    selector = service(job, SITE)["spec"]["selector"]
    assert selector.items() <= master["metadata"]["labels"].items()


def selected(job: PlannedJob, role: Role, index: int) -> bool:
    selector = service(job, SITE)["spec"]["selector"]
    return bool(selector.items() <= pod(job, role, index, 1, SITE)["metadata"]["labels"].items())


def test_our_own_trainer_looks_up_rank_0_alone() -> None:
    job = a_job(workers={"replicas": 3})
    assert [selected(job, Role.WORKER, index) for index in range(3)] == [True, False, False]


def test_an_own_program_may_look_up_every_pod() -> None:
    template = command_template()
    job = a_job(training=None, workers={"template": template}, parameterServers={"replicas": 2, "template": template})
    assert all(selected(job, Role.WORKER, index) for index in range(2))
    assert all(selected(job, Role.PS, index) for index in range(2))


def test_no_name_is_longer_than_a_hostname_may_be() -> None:
    assert len(pod_name("x" * 40, UID, Role.WORKER, 9999, 999)) <= 63


def test_gpus_become_a_limit_and_one_rank_each() -> None:
    job = a_job(workers={"gpusPerPod": 4, "gpuResource": "amd.com/gpu"})
    manifest = pod(job, Role.WORKER, 0, 1, SITE)
    assert manifest["spec"]["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "4"}
    assert environment(manifest)["LOCAL_WORLD_SIZE"] == "4"


def test_parameter_servers_are_addressed_in_every_pod_and_are_no_nodes() -> None:
    template = command_template()
    job = a_job(training=None, workers={"template": template}, parameterServers={"replicas": 2, "template": template})
    plan = GangPlan(job, 1, SITE)
    expected = "digits-3f9a1-ps-0-a1.digits-3f9a1:29600,digits-3f9a1-ps-1-a1.digits-3f9a1:29600"
    worker, server = environment(plan.pod(Role.WORKER, 0)), environment(plan.pod(Role.PS, 1))
    assert worker["DISTTRAIN_PS_ADDRESSES"] == server["DISTTRAIN_PS_ADDRESSES"] == expected
    assert (server["DISTTRAIN_ROLE"], server["DISTTRAIN_ROLE_INDEX"]) == ("ps", "1")
    assert "NODE_RANK" not in server
    assert "PET_NODE_RANK" not in server


def test_servers_of_a_job_that_trains_run_our_own_server() -> None:
    job = a_job(parameterServers={"replicas": 2}, parallelism={"dataParallel": {"mode": "ParameterServer"}})
    server = pod(job, Role.PS, 0, 1, SITE)
    assert environment(server)["LOCAL_WORLD_SIZE"] == "1", "so servers know how many workers the ranks are"
    container = server["spec"]["containers"][0]
    assert container["image"] == "disttrain/trainer:test"
    assert container["command"] == ["python3", "-P", "-m", "disttrain_trainer.parameter_server.server.main"]
    assert {"DISTTRAIN_CONFIG", "DISTTRAIN_PS_ADDRESSES", "WORLD_SIZE"} <= environment(server).keys()
    addressed = service(job, SITE)["spec"]["selector"]
    assert "disttrain.io/role" not in addressed, "workers look their servers up"


def test_a_template_with_a_command_keeps_it_and_gets_no_configuration() -> None:
    job = a_job(training=None, workers={"template": command_template()})
    manifest = pod(job, Role.WORKER, 0, 1, SITE)
    assert manifest["spec"]["containers"][0]["command"] == ["torchrun", "x.py"]
    assert manifest["spec"]["containers"][0]["image"] == "mine:1"
    assert "DISTTRAIN_CONFIG" not in environment(manifest)
    assert set(secret(job, SITE)["stringData"]) == {"token"}


def test_a_job_that_trains_runs_the_agent_of_the_default_image() -> None:
    container = pod(a_job(), Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]
    assert container["image"] == "disttrain/trainer:test"
    assert container["command"] == ["python3", "-P", "-m", "disttrain_agent"]


def test_the_kubelet_is_asked_to_find_out_when_an_agent_has_started_its_ranks() -> None:
    job = a_job(parameterServers={"replicas": 1}, parallelism={"dataParallel": {"mode": "ParameterServer"}})
    worker, server = (pod(job, role, 0, 1, SITE)["spec"]["containers"][0] for role in (Role.WORKER, Role.PS))
    assert asks_for_ranks(worker)
    assert "startupProbe" not in server, "a server has no agent"
    probe = worker["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] > 3600, "the agent gives up, and no kubelet ends it"
    assert not asks_for_ranks(pod(a_job(**OWN_PROGRAM), Role.WORKER, 0, 1, SITE)["spec"]["containers"][0])


@pytest.mark.parametrize("preflight", [True, False])
def test_a_pod_gets_its_nodes_name_where_the_preflight_check_would_print_it(preflight: bool) -> None:
    manifest = pod(a_job(training={"preflight": preflight}), Role.WORKER, 0, 1, SITE)
    value = {"name": "DISTTRAIN_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert (value in manifest["spec"]["containers"][0]["env"]) is preflight


def test_a_startup_probe_of_the_template_stays_as_it_is() -> None:
    own = {"exec": {"command": ["cat", "/tmp/started"]}}
    template = {"spec": {"containers": [{"name": "trainer", "startupProbe": own, "livenessProbe": own}]}}
    trainer = pod(a_job(workers={"template": template}), Role.WORKER, 0, 1, SITE)["spec"]["containers"][0]
    assert (trainer["startupProbe"], trainer["livenessProbe"]) == (own, own)
    assert not asks_for_ranks(trainer)


def test_the_address_of_worker_0_needs_no_ranks_to_be_published() -> None:
    assert service(a_job(), SITE)["spec"]["publishNotReadyAddresses"], "else all would wait for each other"


def test_pod_defaults_are_those_of_the_restricted_standard() -> None:
    spec = pod(a_job(), Role.WORKER, 0, 1, SITE)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert {"name": "disttrain-shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert [toleration["tolerationSeconds"] for toleration in spec["tolerations"]] == [30, 30]


def test_pod_security_template_leaves_the_security_context_alone() -> None:
    spec = pod(a_job(runPolicy={"podSecurity": "Template"}), Role.WORKER, 0, 1, SITE)["spec"]
    assert "securityContext" not in spec
    assert "securityContext" not in spec["containers"][0]


def test_planning_a_pod_changes_neither_the_job_nor_its_siblings() -> None:
    job = a_job(workers={"template": {"spec": {"containers": [{"name": "trainer", "env": []}]}}})
    before = json.dumps(job.spec.workers.template)
    plan = GangPlan(job, 1, SITE)
    first = json.dumps(plan.pod(Role.WORKER, 0))
    plan.pod(Role.WORKER, 1)
    assert json.dumps(plan.pod(Role.WORKER, 0)) == first
    assert json.dumps(job.spec.workers.template) == before


def test_every_child_is_owned_by_the_job_without_blocking_its_deletion() -> None:
    job = a_job(storage=a_claim_template(retain=False))
    for manifest in (service(job, SITE), secret(job, SITE), claim(job), pod(job, Role.WORKER, 0, 1, SITE)):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (UID, True)
        assert "blockOwnerDeletion" not in owner


CLAIM = merge(
    a_claim_template(storageClassName="fast"),
    {
        "volumeClaimTemplate": {
            "metadata": {"labels": {"team": "vision", Label.JOB: "not"}, "annotations": {"mine": "1"}}
        }
    },
)


def test_a_created_claim_outlives_the_job_unless_it_asks_otherwise() -> None:
    manifest = claim(a_job(storage=CLAIM))
    assert "ownerReferences" not in manifest["metadata"]
    assert manifest["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "fast",
    }
    assert manifest["metadata"]["annotations"] == {"mine": "1"}
    labels = manifest["metadata"]["labels"]
    assert labels["team"] == "vision"
    assert labels[Label.JOB] == "digits", "the operator's own labels stay"


@pytest.mark.parametrize(
    ("storage", "name"), [({"claimName": "mine"}, "mine"), (a_claim_template(), "digits-3f9a1-checkpoints")]
)
def test_storage_is_mounted_in_every_pod(storage: dict[str, str], name: str) -> None:
    job = a_job(storage=storage)
    manifest = pod(job, Role.WORKER, 1, 1, SITE)
    volume = next(volume for volume in manifest["spec"]["volumes"] if volume["name"] == "disttrain-storage")
    assert volume["persistentVolumeClaim"] == {"claimName": name}
    assert environment(manifest)["DISTTRAIN_STORAGE"] == "/checkpoints"
    assert (claim(job) is None) == ("claimName" in storage)


def test_an_object_store_is_no_volume() -> None:
    job = a_job(storage={"url": "s3://bucket/a/prefix"})
    manifest = pod(job, Role.WORKER, 1, 1, SITE)
    assert "disttrain-storage" not in str(manifest)
    assert environment(manifest)["DISTTRAIN_STORAGE"] == "s3://bucket/a/prefix"
    assert claim(job) is None


def test_the_secret_is_immutable_and_holds_all_that_a_rank_reads() -> None:
    job = a_job(storage=a_claim_template(), training={"checkpoint": {"folder": "shared-run"}})
    manifest = secret(job, SITE)
    assert manifest["immutable"] is True
    config = JobConfig.model_validate_json(manifest["stringData"]["job.json"])
    assert config.checkpoint_folder == "shared-run"
    assert config.training == job.spec.training
    assert manifest["stringData"]["token"] == "a-token"


def test_only_pods_of_the_job_reach_its_pods_where_the_site_wants_a_policy() -> None:
    job = a_job(parameterServers={"replicas": 2}, parallelism={"dataParallel": {"mode": "ParameterServer"}})
    assert network_policy(job, SITE) is None
    site = replace(SITE, network_policies=True)
    policy = network_policy(job, site)
    assert policy["metadata"]["ownerReferences"] == pod(job, Role.PS, 0, 1, site)["metadata"]["ownerReferences"]
    spec = policy["spec"]
    assert (spec["policyTypes"], "egress" in spec) == (["Ingress"], False), "what pods may reach stays open"
    ((source,),) = (rule["from"] for rule in spec["ingress"])
    assert source.keys() == {"podSelector"}, "a namespace selector would let other namespaces in"
    assert all("ports" not in rule for rule in spec["ingress"])
    for selector in (spec["podSelector"], source["podSelector"]):
        wanted = selector["matchLabels"].items()
        assert wanted
        for member in (pod(job, role, 1, attempt, site) for role in Role for attempt in (1, 2)):
            assert wanted <= member["metadata"]["labels"].items()
        another = replace(job, uid="another-uid")
        assert not wanted <= pod(another, Role.WORKER, 0, 1, site)["metadata"]["labels"].items()


def test_the_operators_pods_reach_the_agents_port_and_no_other() -> None:
    site = replace(SITE, network_policies=True, operator=OperatorPods("disttrain", {"app.kubernetes.io/instance": "d"}))
    for template in ({}, {"spec": {"hostNetwork": True}}):
        job = a_job(workers={"template": template})
        policy = network_policy(job, site)
        _, rule = policy["spec"]["ingress"]
        opened = {str(entry["port"]) for entry in rule["ports"]}
        manifest = pod(job, Role.WORKER, 0, 1, site)["spec"]["containers"][0]
        given = next(entry["value"] for entry in manifest["env"] if entry["name"] == Env.AGENT_PORT)
        assert given in opened
        assert "29700" in opened
        assert [entry["protocol"] for entry in rule["ports"]] == ["TCP", "TCP"]
        (source,) = rule["from"]
        assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "disttrain"}}
        assert source["podSelector"] == {"matchLabels": {"app.kubernetes.io/instance": "d"}}
    own = a_job(training=None, workers={"template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}})
    assert network_policy(own, site)["spec"] == policy["spec"], "a program that reports has an agent"


def test_the_policy_of_a_job_is_the_same_on_the_network_of_its_nodes() -> None:
    """It is made once, and while a job is Suspended its pods may move there."""
    site = replace(SITE, network_policies=True, operator=OperatorPods("system", {"app": "disttrain"}))
    there = {"template": {"spec": {"hostNetwork": True}}}
    jobs = [a_job(), a_job(workers=there)]
    assert network_policy(jobs[0], site) == network_policy(jobs[1], site)
    for job in jobs:
        policy = network_policy(job, site)
        opened = {entry["port"] for entry in policy["spec"]["ingress"][1]["ports"]}
        assert int(environment(pod(job, Role.WORKER, 0, 1, site))[Env.AGENT_PORT]) in opened


def test_the_name_of_the_secret_follows_from_the_token_and_is_the_one_that_pods_mount() -> None:
    job = a_job()
    name = secret(job, SITE)["metadata"]["name"]
    assert name.startswith("digits-3f9a1-")
    volumes = pod(job, Role.WORKER, 0, 1, SITE)["spec"]["volumes"]
    assert {"name": "disttrain-config", "secret": {"secretName": name, "defaultMode": 0o444}} in volumes
    assert secret(job, replace(SITE, token="another"))["metadata"]["name"] != name
    assert "a-token" not in name
    assert len(secret(a_job("a" * 40), SITE)["metadata"]["name"]) <= 63


def test_checkpoints_of_a_job_made_again_lie_in_a_folder_of_their_own() -> None:
    config = JobConfig.model_validate_json(secret(a_job(), SITE)["stringData"]["job.json"])
    assert config.checkpoint_folder == "digits-3f9a1"


def test_on_loopback_every_address_is_a_port_of_this_machine() -> None:
    template = command_template()
    job = a_job(training=None, workers={"template": template}, parameterServers={"replicas": 1, "template": template})
    site = Site("x", "t", storage_dir="/tmp/run/storage", loopback=Loopback(4000, (4001,)))
    found = environment(pod(job, Role.WORKER, 1, 1, site))
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "4000")
    assert found["DISTTRAIN_PS_ADDRESSES"] == "127.0.0.1:4001"


def test_the_charts_values_reach_every_pod() -> None:
    defaults = PodDefaults(image_pull_policy="Always", shm_size_limit="2Gi", user_id=1234, grace_seconds=99)
    spec = pod(a_job(), Role.WORKER, 0, 1, Site("x", "t", defaults=defaults))["spec"]
    assert spec["containers"][0]["imagePullPolicy"] == "Always"
    assert spec["securityContext"]["runAsUser"] == 1234
    assert spec["terminationGracePeriodSeconds"] == 99
    assert {"name": "disttrain-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in spec["volumes"]


def test_what_stands_beside_the_template_reaches_the_trainer() -> None:
    beside = {
        "image": "mine:1",
        "command": ["torchrun", "train.py"],
        "args": ["--lr=3e-4"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "envFrom": [{"secretRef": {"name": "hub"}}],
        "resources": {"limits": {"rdma/hca": 8}},
    }
    template = {"spec": {"containers": [{"name": "side", "image": "s:1"}, {"name": "trainer", "workingDir": "/src"}]}}
    job = a_job(training=None, workers={**beside, "gpusPerPod": 8, "template": template})
    trainer, side = pod(job, Role.WORKER, 0, 1, SITE)["spec"]["containers"]
    assert (side["name"], side["image"]) == ("side", "s:1")
    for key in ("image", "command", "args"):
        assert trainer[key] == beside[key]
    assert trainer["envFrom"][1:] == beside["envFrom"], "after the operator's defaults"
    assert trainer["workingDir"] == "/src"
    assert trainer["resources"]["limits"] == {"rdma/hca": 8, "nvidia.com/gpu": "8"}
    assert environment({"spec": {"containers": [trainer]}})["NCCL_DEBUG"] == "INFO"
