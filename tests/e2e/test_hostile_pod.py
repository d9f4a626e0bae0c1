"""A pod of another namespace attacks the port where ranks meet, while they train and while a gang restarts."""

from pathlib import Path
from typing import Any

from disttrain_api.names import MASTER_PORT
from tests import hostile_peer
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import long_job
from tests.e2e.observe import first_step, train_until_a_checkpoint

CODE = "hostile-code"
STEPS = 600


def attacker(name: str, command: str) -> dict[str, Any]:
    """A pod that runs the command again and again."""
    container = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "command": ["sh", "-c", f"while :; do {command} || sleep 1; done"],
        "volumeMounts": [{"name": CODE, "mountPath": "/code"}],
    }
    volumes = [{"name": CODE, "configMap": {"name": CODE}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_a_stranger_changes_no_bit_of_what_is_trained(kubectl: Kubectl, elsewhere: Kubectl) -> None:
    elsewhere("create", "configmap", CODE, f"--from-file=hostile_peer.py={Path(hostile_peer.__file__)}")
    for name in ("calm", "attacked"):
        kubectl.apply(long_job(name, training={"steps": STEPS}))
    kubectl.wait("Running", "attacked")
    (service,) = kubectl.get("services", "-l", "disttrain.io/job-name=attacked")["items"]
    place = f"{service['metadata']['name']}.{kubectl.namespace}.svc.cluster.local {MASTER_PORT}"
    elsewhere.apply(attacker("attacks", f"python3 /code/hostile_peer.py {place}"))
    elsewhere.apply(attacker("half-open", f"python3 /code/hostile_peer.py {place} half-open --hold"))
    elsewhere.wait_for_log("attacks", r'"connections": [1-9]', job="")
    train_until_a_checkpoint(kubectl, "attacked")
    victim = next(pod for pod in kubectl.pods("attacked") if pod["metadata"]["labels"]["disttrain.io/index"] == "1")
    kubectl("delete", "pod", victim["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")
    kubectl.wait_for("{.status.attempt}=2", "attacked")
    for name in ("calm", "attacked"):
        kubectl.wait("Finished", name)
        assert kubectl.condition(name, "Complete")["status"] == "True", kubectl.describe_job(name)
    assert first_step(kubectl, "attacked", attempt=2) > 1, "it went on from what it had learned under attack"
    calm, attacked = (kubectl.status(name)["progress"] for name in ("calm", "attacked"))
    assert calm["step"] == attacked["step"] == STEPS
    assert attacked["loss"] == calm["loss"], "the loss differs in at least one bit"
    assert kubectl.status("attacked")["restarts"] == 1, "of the pod that was deleted, and for nothing else"
