"""Jobs on a real cluster, from the chart and the images that users get."""

import re
from typing import Any

import pytest

from disttrain_api.names import AGENT_PORT
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import NO_CHECKPOINT_SOON, ONE_THREAD, STORAGE, example, job, long_job
from tests.e2e.observe import checkpoint, end_soon, first_step, saved_step, train_until_a_checkpoint

TORCHRUN = """
cat > /scratch/program.py <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}", flush=True)
dist.barrier()
import os; os._exit(0)
PROGRAM
exec torchrun /scratch/program.py
"""

# The first process of a container does not end by a SIGTERM that it does not handle.
SERVE = """
import os, signal, socketserver, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
port = int(os.environ["DISTTRAIN_PS_ADDRESSES"].split(",")[0].rpartition(":")[2])
socketserver.TCPServer(("", port), socketserver.BaseRequestHandler).serve_forever()
"""
ASK = """
import os, socket, time
for address in os.environ["DISTTRAIN_PS_ADDRESSES"].split(","):
    host, port = address.split(":")
    for _ in range(300):
        try:
            socket.create_connection((host, int(port)), 2).close()
            break
        except OSError:
            time.sleep(0.2)
    else:
        raise SystemExit(f"{address} does not answer")
"""


# The first child of the agent.
KILL_A_RANK = "import os, signal; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), signal.SIGKILL)"


def logs(kubectl: Kubectl, job: str) -> str:
    """Logs of all pods of the job."""
    return "".join(kubectl("logs", pod["metadata"]["name"]) for pod in kubectl.pods(job))


def test_the_example_reaches_its_accuracy(kubectl: Kubectl) -> None:
    kubectl.apply(example("ddp", workers={"template": ONE_THREAD}))
    kubectl.wait("Finished", "ddp")
    status = kubectl.status("ddp")
    assert kubectl.condition("ddp", "Complete")["status"] == "True", kubectl.describe_job("ddp")
    metrics = {metric["name"]: metric["value"] for metric in status["progress"]["metrics"]}
    assert metrics["accuracy"] >= 0.97
    assert status["progress"]["step"] == status["progress"]["totalSteps"]
    assert status["progress"]["samplesPerSecond"] > 0
    assert (status["restarts"], status["mesh"], status["phase"]) == (0, "dp2", "Succeeded")
    line = kubectl("get", "dtj", "ddp").splitlines()
    assert line[0].split() == ["NAME", "PHASE", "REASON", "READY", "ETA", "RESTARTS", "AGE"]


@pytest.mark.parametrize(
    ("name", "mesh", "world"), [("fsdp-tensor", "fsdp2 x tp2", 4), ("pipeline", "pp2", 2), ("moe", "fsdp2 x ep2", 2)]
)
def test_a_model_cut_up_over_two_nodes(kubectl: Kubectl, name: str, mesh: str, world: int) -> None:
    """Layers shared within a pod and parameters across pods; stages, and experts, on a node each."""
    kubectl.apply(example(name, workers={"template": ONE_THREAD}, training={"steps": 30, "preflight": True}))
    kubectl.wait("Finished", name)
    status = kubectl.status(name)
    assert kubectl.condition(name, "Complete")["status"] == "True", kubectl.describe_job(name)
    assert (status["restarts"], status["mesh"], status["worldSize"]) == (0, mesh, world)
    metrics = {metric["name"]: metric["value"] for metric in status["progress"]["metrics"]}
    # Knowing nothing costs 5.5 nats per byte, knowing how often each byte occurs about 3.3.
    assert metrics["loss"] < 3.3
    assert f"preflight: data are right between {world} ranks" in logs(kubectl, name)


def test_two_jobs_on_the_nodes_own_network_do_not_meet(kubectl: Kubectl) -> None:
    """Both are made before either has begun, and each has ports of its own on the same two nodes."""
    # Restricted and Baseline refuse the network of the node.
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    names = ("host-a", "host-b")
    for name in names:
        manifest = example("collectives")
        manifest["metadata"]["name"] = name
        manifest["spec"]["workers"]["template"]["spec"]["hostNetwork"] = True
        kubectl.apply(manifest)
    ports: list[int] = []
    for name in names:
        kubectl.wait("Finished", name)
        assert kubectl.condition(name, "Complete")["status"] == "True", kubectl.describe_job(name)
        assert "36 checks, all right" in logs(kubectl, name)
        pods = kubectl.pods(name)
        assert {(pod["spec"]["hostNetwork"], pod["spec"]["dnsPolicy"]) for pod in pods} == {
            (True, "ClusterFirstWithHostNet")
        }
        assert all(pod["status"]["podIP"] == pod["status"]["hostIP"] for pod in pods)
        ports += [port["hostPort"] for pod in pods for port in pod["spec"]["containers"][0].get("ports", [])]
    assert len(ports) == len(set(ports)) == 4, "rank 0 of each listens, and the agent beside it"


def test_a_killed_rank_resumes_from_the_checkpoint_on_shared_storage(kubectl: Kubectl) -> None:
    kubectl.apply(long_job("killed"))
    step = train_until_a_checkpoint(kubectl, "killed", at_least=40)
    (victim,) = [p for p in kubectl.pods("killed") if p["metadata"]["labels"]["disttrain.io/index"] == "1"]
    kubectl("exec", victim["metadata"]["name"], "-c", "trainer", "--", "python3", "-c", KILL_A_RANK)
    kubectl.wait_for("{.status.attempt}=2", "killed")
    kubectl.wait("Running", "killed")
    assert first_step(kubectl, "killed", attempt=2) >= step
    status = kubectl.status("killed")
    assert status["restarts"] == 1
    verdict = status["attempts"][0]["verdict"]
    assert (verdict["rank"], verdict["signal"]) == (1, 9), verdict
    assert verdict["node"]
    end_soon(kubectl, "killed")


def uids(kubectl: Kubectl, job: str) -> dict[str, str]:
    """By pod."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in kubectl.pods(job)}


def test_a_killed_rank_restarts_those_of_all_pods_and_a_lost_pod_is_recreated_alone_worker_0s_too(
    kubectl: Kubectl,
) -> None:
    kubectl.apply(long_job("together", runPolicy={"restartStrategy": "InPlace"}))
    kept = train_until_a_checkpoint(kubectl, "together", at_least=40)
    before = uids(kubectl, "together")
    first, victim = sorted(before)
    kubectl("exec", victim, "-c", "trainer", "--", "python3", "-c", KILL_A_RANK)
    kubectl.wait_for("{.status.attempts[0].restartsInPlace}=1", "together")
    # Further than it has come until it was killed.
    checkpoint(kubectl, "together", at_least=kept + 80)
    status = kubectl.status("together")
    assert (status["attempt"], status["restarts"], status["phase"]) == (1, 0, "Running"), kubectl.describe_job(
        "together"
    )
    assert uids(kubectl, "together") == before
    assert {pod["status"]["containerStatuses"][0]["restartCount"] for pod in kubectl.pods("together")} == {0}
    why = status["attempts"][0]["lastRestartInPlace"]
    assert why.startswith(f"rank 1 (pod {victim} "), why
    assert "was killed by signal 9" in why
    for rank, (lost, stays) in ((1, (victim, first)), (0, (first, victim))):
        kubectl("delete", "pod", lost, "--wait=false")
        kubectl.wait_for(f"{{.status.attempts[0].restartsInPlace}}={3 - rank}", "together")
        checkpoint(kubectl, "together", at_least=kept + 240 - 80 * rank)
        status, after = kubectl.status("together"), uids(kubectl, "together")
        (attempt,) = status["attempts"]
        assert (status["restarts"], status["phase"]) == (2 - rank, "Running"), kubectl.describe_job("together")
        assert attempt["replacements"][-1]["pod"] == lost
        assert attempt["lastRestartInPlace"] == f"rank {rank} was lost with its former pod {lost}"
        assert (after.keys(), after[stays]) == (before.keys(), before[stays]), kubectl.describe_job("together")
        assert after[lost] != before[lost]
        before = after
    assert "it alone is recreated, and the ranks of all pods wait for it" in kubectl("events", "--for", "dtj/together")
    kubectl("delete", "pod", first, victim, "--wait=false")
    kubectl.wait_for("{.status.attempt}=2", "together")
    kubectl.wait("Running", "together")
    assert first_step(kubectl, "together", attempt=2) >= kept + 240
    end_soon(kubectl, "together")


OWN_LOOP = """
import time
import torch
import disttrain

with disttrain.session(steps=1_000_000, checkpoint_interval=20) as session:
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    session.restore(model=model, optimizer=optimizer)
    while not session.finished:
        time.sleep(0.05)
        loss = model(torch.ones(1, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.step(loss=loss)
"""
# The ranks are the children of torchrun, which is the agent's only child.
KILL_A_RANK_OF_TORCHRUN = """
import os, signal
children = lambda pid: open(f"/proc/{pid}/task/{pid}/children").read().split()
is_rank = lambda pid: b"/loop/loop.py" in open(f"/proc/{pid}/cmdline", "rb").read()
os.kill(int(next(filter(is_rank, children(children(1)[0])))), signal.SIGKILL)
"""


def test_a_killed_rank_of_torchrun_restarts_those_of_all_pods_in_place_from_the_sessions_checkpoint(
    kubectl: Kubectl,
) -> None:
    kubectl("create", "configmap", "loop", f"--from-literal=loop.py={OWN_LOOP}")
    container = {"name": "trainer", "env": ONE_THREAD["spec"]["containers"][0]["env"]}
    container["volumeMounts"] = [{"name": "loop", "mountPath": "/loop"}]
    template = {"spec": {"containers": [container], "volumes": [{"name": "loop", "configMap": {"name": "loop"}}]}}
    workers = {"replicas": 2, "processesPerPod": 2, "image": TRAINER_IMAGE, "template": template}
    workers["command"] = ["torchrun", "/loop/loop.py"]
    kubectl.apply(
        job("torchrun", {"workers": workers, "storage": STORAGE, "runPolicy": {"restartStrategy": "InPlace"}})
    )
    kept = train_until_a_checkpoint(kubectl, "torchrun", at_least=40)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in kubectl.pods("torchrun")}
    first, victim = sorted(before)
    kubectl("exec", victim, "-c", "trainer", "--", "python3", "-c", KILL_A_RANK_OF_TORCHRUN)
    kubectl.wait_for("{.status.attempts[0].restartsInPlace}=1", "torchrun")
    # Further than it has come until it was killed.
    checkpoint(kubectl, "torchrun", at_least=kept + 80)
    status = kubectl.status("torchrun")
    assert (status["attempt"], status["restarts"], status["phase"]) == (1, 0, "Running"), kubectl.describe_job(
        "torchrun"
    )
    assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in kubectl.pods("torchrun")} == before
    why = status["attempts"][0]["lastRestartInPlace"]
    assert f"(pod {victim} " in why, why
    assert "was killed by signal 9" in why
    resumed = re.search(r"resuming after step (\d+) ", kubectl("logs", first, "-c", "trainer"))
    assert resumed is not None
    assert int(resumed[1]) >= kept
    end_soon(kubectl, "torchrun")


def test_suspend_writes_a_checkpoint_and_resume_goes_on_from_it(kubectl: Kubectl) -> None:
    kubectl.apply(long_job("pause", training=NO_CHECKPOINT_SOON))
    first_step(kubectl, "pause", attempt=1)
    kubectl("patch", "dtj", "pause", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    kubectl.wait("Suspended", "pause")
    kubectl.until(lambda: not kubectl.pods("pause"), "no pods", job="pause")
    saved = saved_step(kubectl, "pause")
    kubectl("patch", "dtj", "pause", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    kubectl.wait("Running", "pause")
    assert saved < first_step(kubectl, "pause", attempt=2) <= saved + 20
    assert kubectl.status("pause")["restarts"] == 0
    end_soon(kubectl, "pause")


WITHOUT_DNS = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}


def test_pods_without_dns_meet_where_the_operator_says(kubectl: Kubectl) -> None:
    kubectl.apply(long_job("nameless", workers={"template": {"spec": WITHOUT_DNS}}))
    assert first_step(kubectl, "nameless", attempt=1) > 0
    for pod in kubectl.pods("nameless"):
        assert "whose name has no address yet" in kubectl("logs", pod["metadata"]["name"], "-c", "trainer")
    end_soon(kubectl, "nameless")


def test_agents_that_wait_for_an_address_are_not_a_job_that_runs(kubectl: Kubectl) -> None:
    """Neither DNS has it, nor can the operator say it: another program has the port of the agents."""
    held = f"import socket, time; taken = socket.create_server(('', {AGENT_PORT})); time.sleep(100_000)"
    sidecar = {
        "name": "holds-the-port",
        "image": TRAINER_IMAGE,
        "command": ["python3", "-c", held],
        "restartPolicy": "Always",
        # No agent starts before.
        "startupProbe": {"tcpSocket": {"port": AGENT_PORT}, "periodSeconds": 1, "failureThreshold": 60},
    }
    kubectl.apply(long_job("lost", workers={"template": {"spec": {**WITHOUT_DNS, "initContainers": [sidecar]}}}))
    kubectl.until(
        lambda: kubectl.condition("lost", "Running")["reason"] == "WaitingForAddress",
        "say what it waits for",
        job="lost",
    )
    running = kubectl.condition("lost", "Running")
    assert running["status"] == "False"
    assert "worker 0" in running["message"], running["message"]
    assert {pod["status"]["phase"] for pod in kubectl.pods("lost")} == {"Running"}


def test_an_image_that_does_not_exist_ends_with_its_reason(kubectl: Kubectl) -> None:
    container = {"name": "trainer", "image": "localhost/no/such:image"}
    workers = {"template": {"spec": {"containers": [container]}}}
    kubectl.apply(long_job("noimage", workers=workers, runPolicy={"startingDeadlineSeconds": 60}))
    found = kubectl.until(
        lambda: kubectl.condition("noimage", "Running").get("reason") == "ImagePullBackOff", "the reason"
    )
    assert found
    kubectl.wait("Finished", "noimage")
    failed = kubectl.condition("noimage", "Failed")
    assert failed["reason"] == "ImagePullBackOff"
    assert "localhost/no/such:image" in failed["message"]


def test_a_job_deleted_and_made_again_at_once_starts_anew_and_deletion_leaves_nothing(kubectl: Kubectl) -> None:
    manifest = long_job("again")
    kubectl.apply(manifest)
    train_until_a_checkpoint(kubectl, "again", at_least=60)
    first = kubectl.get("dtj", "again")["metadata"]["uid"]
    kubectl("delete", "dtj", "again", "--wait=false")
    kubectl.until(lambda: kubectl.run("get", "dtj", "again").returncode != 0, "the old job gone")
    kubectl.apply(manifest)
    kubectl.wait("Running", "again")
    second = kubectl.get("dtj", "again")["metadata"]["uid"]
    assert second != first
    kubectl.until(
        lambda: {p["metadata"]["labels"]["disttrain.io/job-uid"] for p in kubectl.pods("again")} == {second},
        "only pods of the new job",
        job="again",
    )
    assert first_step(kubectl, "again", attempt=1) <= 20
    end_soon(kubectl, "again")
    left = "pods,services,secrets,persistentvolumeclaims"
    kubectl.until(lambda: not kubectl.get(left, "-l", "disttrain.io/job-name=again")["items"], "nothing left")


def test_an_unmodified_torchrun_script_runs_and_its_progress_is_read_from_its_lines(kubectl: Kubectl) -> None:
    workers = {"replicas": 2, "processesPerPod": 2, "image": TRAINER_IMAGE, "command": ["/bin/sh", "-c", TORCHRUN]}
    progress = {"totalSteps": 4, "logRules": [{"pattern": r"rank \d of (?P<step>\d): (?P<loss>\d)$"}]}
    kubectl.apply(job("torchrun", {"workers": workers, "progress": progress}))
    kubectl.wait("Finished", "torchrun")
    assert kubectl.condition("torchrun", "Complete")["status"] == "True", kubectl.describe_job("torchrun")
    assert sorted(re.findall(r"rank (\d) of 4: 6", logs(kubectl, "torchrun"))) == ["0", "1", "2", "3"]
    seen = kubectl.status("torchrun")["progress"]
    assert (seen["step"], seen["totalSteps"], seen["loss"]) == (4, 4, 6)


def test_parameter_server_pods_are_addressed_counted_and_end_with_the_workers(kubectl: Kubectl) -> None:
    def pods(code: str) -> dict[str, Any]:
        container = {"name": "trainer", "image": TRAINER_IMAGE, "command": ["python3", "-c", code]}
        return {"replicas": 2, "template": {"spec": {"containers": [container]}}}

    kubectl.apply(job("servers", {"workers": pods(ASK), "parameterServers": pods(SERVE)}))
    kubectl.wait("Finished", "servers")
    assert kubectl.condition("servers", "Complete")["status"] == "True", kubectl.describe_job("servers")
    kubectl.until(
        lambda: all(p["status"]["phase"] in ("Succeeded", "Failed") for p in kubectl.pods("servers")),
        "the servers end",
        job="servers",
    )
