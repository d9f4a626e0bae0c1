"""The dashboard that the chart serves, in its pod: through a port-forward, and through its Service as an ingress."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.browser.viewer import LINK, NAMES, enter
from tests.e2e.conftest import SYSTEM, Helm
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import long_job
from tests.e2e.observe import end_soon
from tests.integration.dashboard_process import ask
from tests.needs import NO_BROWSER
from tools.chromium import browser, program

NAME = "disttrain-dashboard"
LABEL = f"app.kubernetes.io/instance={NAME}"
SERVICE = f"http://{NAME}.{SYSTEM}.svc.cluster.local"
ADMITTED = r"dashboard.networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name"
PHASE = "document.querySelector('.job .phase').textContent"
READ = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""


@pytest.fixture
def served(operator: Kubectl, kubectl: Kubectl, helm: Helm) -> Iterator[None]:
    """The chart with the dashboard, which the pods of the test's namespace may reach."""
    helm.install("dashboard.enabled=true", f"{ADMITTED}={kubectl.namespace}")
    yield
    helm.install()
    assert not operator.get("pods", "-l", LABEL, "--field-selector=status.phase=Failed")["items"]


@contextmanager
def forwarded(operator: Kubectl) -> Iterator[str]:
    """The address on this machine that a port-forward to the Service gives the dashboard."""
    with operator.start("port-forward", f"service/{NAME}", ":80") as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.match(r"Forwarding from (127\.0\.0\.1:\d+) ", line)
            assert match is not None, f"kubectl port-forward printed {line!r}"
            yield f"http://{match[1]}/"
        finally:
            process.kill()


def answers(address: str) -> bool:
    try:
        return ask(address, "api/jobs")[0] == 401
    except OSError:
        return False


def a_viewer(kubectl: Kubectl, name: str = "viewer", role: str = "view") -> str:
    """The token of an account with a role in its namespace, made by the commands of docs/dashboard.md."""
    kubectl("create", "serviceaccount", name)
    account = f"--serviceaccount={kubectl.namespace}:{name}"
    kubectl("create", "rolebinding", name, f"--clusterrole={role}", account)
    return kubectl("create", "token", name, "--duration=8h").strip()


def pod(operator: Kubectl) -> dict[str, Any]:
    """The dashboard's only pod that does not end."""
    items = operator.get("pods", "-l", LABEL)["items"]
    (found,) = [one for one in items if "deletionTimestamp" not in one["metadata"]]
    return dict(found)


def test_viewers_see_their_own_jobs_alone_also_after_the_pod_was_deleted(
    kubectl: Kubectl, operator: Kubectl, elsewhere: Kubectl, served: None
) -> None:
    kubectl.apply(long_job("seen"))
    elsewhere.apply(long_job("hidden", suspend=True))
    token, other = a_viewer(kubectl), a_viewer(elsewhere)
    kubectl.wait_for("{.status.progress.loss}", "seen")
    own, foreign = f"{kubectl.namespace}/seen", f"{elsewhere.namespace}/hidden"
    both = f"api/jobs?namespaces={kubectl.namespace},{elsewhere.namespace}"

    with forwarded(operator) as address:
        for path in ("api/jobs", both, f"api/job?key={own}", f"api/log?key={own}&rank=0&tail=1"):
            status, answer = ask(address, path)
            assert (status, answer["ask"]) == (401, "token"), path
            assert "seen" not in str(answer)
            assert ask(address, path, "nonsense")[0] == 401
        status, answer = ask(address, "api/jobs", token)
        assert (status, answer["ask"]) == (403, "namespaces")
        assert f"system:serviceaccount:{kubectl.namespace}:viewer" in answer["error"]

        for mine, theirs, shown, kept in ((token, other, own, foreign), (other, token, foreign, own)):
            status, answer = ask(address, both, mine)
            assert (status, [job["key"] for job in answer["jobs"]]) == (200, [shown])
            assert f"cannot list jobs of namespace {kept.partition('/')[0]}" in answer["more"]
            assert ask(address, f"api/job?key={shown}", mine)[0] == 200
            assert ask(address, f"api/job?key={shown}", theirs)[0] == 403
            status, answer = ask(address, f"api/log?key={kept}&rank=0&tail=1", mine)
            assert (status, "lines" in answer) == (403, False)

        _, answer = ask(address, f"api/job?key={own}", token)
        assert (answer["job"]["phase"], answer["job"]["strategy"]) == ("Running", "dp2")
        assert answer["job"]["step"] > 0
        assert (answer["ranks"]["states"], len(answer["ranks"]["pods"])) == ("rr", 2)
        assert answer["events"]
        _, answer = ask(address, f"api/log?key={own}&rank=0&tail=20", token)
        assert any("loss" in line for line in answer["lines"])

        stacks = f"api/stacks?key={own}&rank=1"
        status, answer = ask(address, stacks, token)
        assert (status, "lines" in answer) == (403, False)
        assert "the token of the job's agents" in answer["error"]
        status, answer = ask(address, stacks, a_viewer(kubectl, "editor", "edit"))
        assert (status, "Current thread" in str(answer)) == (200, True), answer

        before = pod(operator)
        inside = ("exec", before["metadata"]["name"], "--", "ls")
        assert operator.run(*inside, "/etc/kubernetes-ca").stdout.split() == ["ca.crt"]
        assert operator.run(*inside, "/var/run/secrets").returncode != 0, "there is a token of Kubernetes"
        log = operator("logs", before["metadata"]["name"])
        assert "serving at port 8080" in log
        assert not [word for word in ("Traceback", token, other) if word in log]

    trainer = kubectl.pods("seen")[0]["metadata"]["name"]
    look = ("exec", trainer, "-c", "trainer", "--", "python3", "-c", READ, f"{SERVICE}/{both}", token)
    assert [job["key"] for job in json.loads(kubectl(*look))["jobs"]] == [own]

    with forwarded(operator) as address:
        operator("delete", "pod", before["metadata"]["name"])
        kubectl.until(lambda: not answers(address), "the port-forward ends with its pod")
    answer = json.loads(kubectl.until(lambda: kubectl.run(*look).stdout, "the Service leads to another pod"))
    assert [job["key"] for job in answer["jobs"]] == [own]
    assert pod(operator)["metadata"]["uid"] != before["metadata"]["uid"]
    with forwarded(operator) as address:
        assert ask(address, f"api/job?key={own}", token)[1]["job"]["phase"] == "Running"
        assert ask(address, f"api/job?key={own}")[0] == 401
        assert ask(address, f"api/job?key={own}", other)[0] == 403
    end_soon(kubectl, "seen")


@pytest.mark.skipif(program() is None, reason=NO_BROWSER)
async def test_a_browser_shows_a_job_through_a_port_forward(kubectl: Kubectl, operator: Kubectl, served: None) -> None:
    kubectl.apply(long_job("seen", suspend=True))
    kubectl.wait("Suspended", "seen")
    token = a_viewer(kubectl)
    with forwarded(operator) as address:
        async with browser() as page:
            await page.open(address)
            await page.until("document.activeElement?.id === 'token'")
            await enter(page, token, kubectl.namespace)
            await page.until(f"{NAMES} === 'seen' && {LINK} === ''")
            await page.value("document.querySelector('tbody a').click()")
            await page.until("document.querySelector('h1').textContent === 'seen'")
            # The page asks every two seconds, each time by a connection of its own.
            await page.until(f"{PHASE} === 'Suspended'")
            kubectl("patch", "dtj", "seen", "--type=merge", "-p", '{"spec":{"suspend":false}}')
            kubectl.wait("Running", "seen")
            await page.until(f"{PHASE} === 'Running'")
            assert page.problems == []
    end_soon(kubectl, "seen")
