"""The chart's life on a real cluster: install, upgrade, uninstall."""

from tests.e2e.conftest import SYSTEM, Helm
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import long_job


def test_an_upgrade_and_an_uninstall_leave_running_jobs_alone(kubectl: Kubectl, operator: Kubectl, helm: Helm) -> None:
    kubectl.apply(long_job("kept"))
    kubectl.wait("Running", "kept")
    before = {pod["metadata"]["uid"] for pod in kubectl.pods("kept")}
    key = operator.get("secret", "disttrain-job-token-key")["data"]["key"]

    helm.install("log.level=debug")
    (deployed,) = operator.get("deployments")["items"]
    assert "--log-level=debug" in deployed["spec"]["template"]["spec"]["containers"][0]["args"]
    assert operator.get("secret", "disttrain-job-token-key")["data"]["key"] == key
    helm("test", "disttrain", "-n", SYSTEM, "--timeout", "300s")

    helm("uninstall", "disttrain", "-n", SYSTEM, "--wait")
    assert kubectl.get("dtj", "kept")["status"]["phase"] == "Running"
    assert {pod["metadata"]["uid"] for pod in kubectl.pods("kept")} == before

    helm.install()
    assert operator.get("secret", "disttrain-job-token-key")["data"]["key"] == key
    kubectl("patch", "dtj", "kept", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    kubectl.wait("Suspended", "kept")
    assert kubectl.status("kept")["restarts"] == 0
    kubectl("delete", "dtj", "kept", "--timeout=120s", timeout=150)
