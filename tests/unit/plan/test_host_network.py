"""Pods on the network of their nodes: ports that do not collide."""

from dataclasses import replace

from disttrain_api.names import Role
from disttrain_operator.plan.desired import pod, service
from disttrain_operator.plan.site import PlannedJob
from tests.builders import UID, a_job
from tests.unit.plan.test_pods import SITE, environment


def on_the_host(uid: str) -> PlannedJob:
    """A job of two workers and two servers on the network of their nodes."""
    template = {"spec": {"hostNetwork": True}}
    job = a_job(
        training=None,
        workers={"replicas": 2, "image": "a:1", "template": template},
        parameterServers={"replicas": 2, "image": "a:1", "template": template},
    )
    return replace(job, uid=uid)


def test_jobs_on_the_network_of_their_nodes_listen_on_ports_that_the_scheduler_keeps_apart() -> None:
    job = on_the_host(UID)
    master, server = pod(job, Role.WORKER, 0, 1, SITE), pod(job, Role.PS, 1, 1, SITE)
    found = environment(master)
    opened, agent = master["spec"]["containers"][0]["ports"]
    (served,) = server["spec"]["containers"][0]["ports"]
    assert agent["hostPort"] == int(found["DISTTRAIN_AGENT_PORT"])
    assert opened["hostPort"] == opened["containerPort"] == int(found["MASTER_PORT"]) == int(found["PET_MASTER_PORT"])
    addresses = found["DISTTRAIN_PS_ADDRESSES"].split(",")
    assert {address.rpartition(":")[2] for address in addresses} == {str(served["hostPort"])}
    assert "ports" not in pod(job, Role.WORKER, 1, 1, SITE)["spec"]["containers"][0], "it listens to nobody"
    assert master["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet", "else it finds no peer by name"
    (port,) = service(job, SITE)["spec"]["ports"]
    assert port["port"] == opened["hostPort"]


def test_few_jobs_on_the_network_of_a_node_share_a_port() -> None:
    ports = set()
    for number in range(100):
        job = on_the_host(f"{number:08x}-0000-4000-8000-000000000001")
        found = environment(pod(job, Role.WORKER, 0, 1, SITE))
        pair = {int(found["MASTER_PORT"]), int(found["DISTTRAIN_PS_ADDRESSES"].rpartition(":")[2])}
        assert len(pair) == 2
        assert all(20_000 <= port < 29_000 for port in pair)
        ports |= pair
    assert len(ports) > 180
