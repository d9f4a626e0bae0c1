"""A job with parameter servers on a real cluster: a server, the manager and a worker are killed; nobody else stops."""

from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import server_job
from tests.e2e.observe import checkpoint, pod, wait_until_anew

STEPS = 1_500
AGAIN = r"resumes from its snapshot after \d+ updates, as incarnation 2"
# By what was made again.
LOG_LINES = {("ps", "1"): (AGAIN,), ("ps", "0"): (AGAIN, r"resumes after step \d+, with reports of 2 workers")}


def test_servers_manager_and_worker_are_replaced_one_by_one(kubectl: Kubectl) -> None:
    kubectl.apply(server_job("async", STEPS))
    kubectl.wait("Running", "async")
    killed, step = [], 0
    for role, index in (("ps", "1"), ("ps", "0"), ("worker", "1")):
        step = checkpoint(kubectl, "async", step + 1)
        victim = pod(kubectl, "async", role, index)
        killed.append(victim["metadata"]["name"])
        kubectl("delete", "pod", killed[-1], "--grace-period=0", "--force")
        wait_until_anew(kubectl, "async", role, index, victim)
        for line in LOG_LINES.get((role, index), ()):
            kubectl.wait_for_log(pod(kubectl, "async", role, index)["metadata"]["name"], line, job="async")
    kubectl.wait("Finished", "async", patience=1200)
    status = kubectl.status("async")
    described = kubectl.describe_job("async")
    assert kubectl.condition("async", "Complete")["status"] == "True", described
    # Nobody but the killed was made again, and the status names them in order.
    assert status["attempt"] == 1, described
    assert [entry["pod"] for entry in status["attempts"][0]["replacements"]] == killed, described
    assert (status["restarts"], status["progress"]["step"]) == (3, STEPS)
    metrics = {metric["name"]: metric["value"] for metric in status["progress"]["metrics"]}
    assert metrics["accuracy"] >= 0.95, described
    events = kubectl("get", "events", "--field-selector=reason=PodRestarted", "-o", "jsonpath={.items[*].message}")
    assert all(name in events for name in killed), events
