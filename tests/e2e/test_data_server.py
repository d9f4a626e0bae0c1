"""What a job does while the server of its data is dead, or does not answer."""

from pathlib import Path
from typing import Any

from tests.e2e import served_data
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import USER_CODE, long_job
from tests.e2e.observe import checkpoint, end_soon, train_until_a_checkpoint, verdict

SERVER = "data"
# The server is not the first process of its pod, which no signal stops.
START = "python3 /user-code/served_data.py & wait"
SIGNAL_IT = """
import glob, os, sys
for path in glob.glob("/proc/[0-9]*/cmdline"):
    if b"served_data.py\\0" in open(path, "rb").read() and path != "/proc/1/cmdline":
        os.kill(int(path.split("/")[2]), int(sys.argv[1]))
"""
STOP, CONTINUE = "19", "18"


def server_pod() -> dict[str, Any]:
    container = {
        "name": "server",
        "image": TRAINER_IMAGE,
        "command": ["sh", "-c", START],
        "readinessProbe": {"tcpSocket": {"port": served_data.PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": USER_CODE, "mountPath": "/user-code"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": USER_CODE, "configMap": {"name": "served-data"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": SERVER, "labels": {"app": SERVER}}, "spec": spec}


def serve(kubectl: Kubectl) -> None:
    kubectl.apply(server_pod())
    kubectl("wait", "pod", SERVER, "--for=condition=Ready", "--timeout=120s", timeout=150)


def serve_data(kubectl: Kubectl) -> None:
    """Have a server of samples, and a name for it."""
    kubectl("create", "configmap", "served-data", f"--from-file={Path(served_data.__file__)}")
    port = {"port": served_data.PORT}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVER}}
    kubectl.apply(service | {"spec": {"selector": {"app": SERVER}, "ports": [port], "clusterIP": "None"}})
    serve(kubectl)


def hang_of(kubectl: Kubectl) -> str:
    """What an Event says of the job's hang; "" before there is one."""
    selected = "--field-selector=involvedObject.name=served,reason=ProgressDeadlineExceeded"
    return "".join(one["message"] for one in kubectl.get("events", selected)["items"])


def a_job(**spec: Any) -> dict[str, Any]:
    template = {"volumes": [{"name": USER_CODE, "configMap": {"name": "served-data"}}]}
    data = {"entrypoint": "served_data:images", "config": {"seconds": None, "host": SERVER}}
    return long_job("served", workers={"template": {"spec": template}}, training={"data": data}, **spec)


def test_a_job_outlives_its_data_server_and_one_that_is_silent_is_a_hang_in_its_samples(kubectl: Kubectl) -> None:
    serve_data(kubectl)
    kubectl.apply(a_job(runPolicy={"progressDeadlineSeconds": 60, "maxRestarts": 100}))
    train_until_a_checkpoint(kubectl, "served")

    kubectl("delete", "pod", SERVER)
    found = verdict(kubectl, "served")
    assert found["class"] == "Program", found
    assert "served_data.py" in found["message"], found
    kept = kubectl.status("served")["checkpoint"]["step"]
    serve(kubectl)
    kept = checkpoint(kubectl, "served", at_least=kept + 20)

    attempt = kubectl.status("served")["attempt"]
    kubectl("exec", SERVER, "--", "python3", "-c", SIGNAL_IT, STOP)
    found = verdict(kubectl, "served", attempt)
    assert (found["class"], found["reason"]) == ("Hang", "ProgressDeadlineExceeded"), found
    assert "served_data.py" in found["message"], found
    kubectl("exec", SERVER, "--", "python3", "-c", SIGNAL_IT, CONTINUE)
    checkpoint(kubectl, "served", at_least=kept + 20)
    end_soon(kubectl, "served")


def test_ranks_that_restart_in_place_outlive_their_data_server_in_their_pods(kubectl: Kubectl) -> None:
    serve_data(kubectl)
    policy = {"restartStrategy": "InPlace", "progressDeadlineSeconds": 60, "maxRestarts": 100}
    kubectl.apply(a_job(runPolicy=policy | {"restartBackoffSeconds": 1}))
    train_until_a_checkpoint(kubectl, "served")
    uids = {one["metadata"]["name"]: one["metadata"]["uid"] for one in kubectl.pods("served")}

    def restarted_for(why: str) -> dict[str, Any] | None:
        (attempt,) = kubectl.status("served")["attempts"]
        return attempt if why in attempt.get("lastRestartInPlace", "") else None

    kubectl("delete", "pod", SERVER)
    found = kubectl.until(lambda: restarted_for("exited with code 1"), "the ranks start again", job="served")
    assert "served_data.py" in found["lastRestartInPlace"], found
    kept = checkpoint(kubectl, "served")
    serve(kubectl)
    kept = checkpoint(kubectl, "served", at_least=kept + 20)

    kubectl("exec", SERVER, "--", "python3", "-c", SIGNAL_IT, STOP)
    said = kubectl.until(lambda: hang_of(kubectl), "the hang is found", job="served")
    assert "all ranks wait for data" in said, said
    assert "served_data.py" in said, said
    kubectl("exec", SERVER, "--", "python3", "-c", SIGNAL_IT, CONTINUE)
    checkpoint(kubectl, "served", at_least=kept + 20)
    assert {one["metadata"]["name"]: one["metadata"]["uid"] for one in kubectl.pods("served")} == uids
    assert (kubectl.status("served")["attempt"], kubectl.status("served")["restarts"]) == (1, 0)
    end_soon(kubectl, "served")
