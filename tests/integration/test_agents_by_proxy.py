"""A real API server passes an operator's questions on to agents.

The pods' addresses exist nowhere: the API server reaches them by a proxy (HTTP_PROXY), which leads to an agent that the
test plays on loopback. API servers pass nothing on to loopback addresses.
"""

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from disttrain_api.agent_token import agent_token
from disttrain_api.names import AGENT_PORT, TOKEN_HEADER
from tests.forward_proxy import ForwardProxy
from tests.integration.generated import TRAINING
from tests.integration.operator_process import OperatorProcess, Team, eventually, install_crd
from tools.cluster.control_plane import ControlPlane

POD_ADDRESS = "10.9.8.7"


class PlayedAgent(ThreadingHTTPServer):
    """Answers every request with `answer`, and keeps what was asked: path, token and Authorization."""

    daemon_threads = True
    answer: tuple[int, bytes] = (401, b"{}")

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str | None]] = []
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                agent.asked.append((self.path, self.headers[TOKEN_HEADER], self.headers["Authorization"]))
                code, body = agent.answer
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nowhere."""

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def agent() -> Iterator[PlayedAgent]:
    with PlayedAgent() as played:
        threading.Thread(target=played.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield played
        played.shutdown()


@pytest.fixture
def proxying(agent: PlayedAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """A control plane whose API server finds the agent at every address that is not of this machine."""
    with ForwardProxy(("127.0.0.1", agent.server_port)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with ControlPlane() as control_plane:
            monkeypatch.delenv("HTTP_PROXY")
            install_crd(control_plane.api)
            yield control_plane


def test_an_operator_with_a_kubeconfig_asks_agents_through_the_api_server(
    proxying: ControlPlane, agent: PlayedAgent, tmp_path: Path
) -> None:
    """An agent's refusal is none of the API server's: the operator stays ready and logs in no second time."""
    operator = OperatorProcess(proxying, tmp_path, "--progress-interval-seconds=0.1")
    team = Team(proxying.api, "outside")
    manifest = {"metadata": {"name": "job"}, "spec": {"workers": {"replicas": 1}, "training": TRAINING}}
    about = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob"}
    try:
        operator.start()
        team.ask("POST", "/apis/disttrain.io/v1alpha1/namespaces/outside/disttrainingjobs", about | manifest)
        (pod,) = team.wait_for_pods(1)
        team.run([pod])
        team.set_status(pod, {"podIP": POD_ADDRESS, "podIPs": [{"ip": POD_ADDRESS}]})
        eventually(lambda: len(agent.asked) > 2, operator.log)
        assert "progress" not in team.status()
        assert operator.health("readyz") == 200
        pages = [line for line in operator.page("metrics").splitlines() if "api_requests_total{" in line]
        assert pages
        assert not any('code="401"' in line for line in pages), pages

        uid = pod["metadata"]["ownerReferences"][0]["uid"]
        report = {"rank": 0, "report": {"rank": 0, "step": 5, "totalSteps": 9}}
        agent.answer = (200, json.dumps({"jobUid": uid, "attempt": 1, "ranks": [report]}).encode())
        eventually(lambda: team.status().get("progress", {}).get("step") == 5, operator.log)
        token = agent_token(hmac.new((tmp_path / "token-key").read_bytes(), uid.encode(), hashlib.sha256).hexdigest())
        assert {asked[1:] for asked in agent.asked} == {(token, None)}
        assert {asked[0].removeprefix(f"http://{POD_ADDRESS}:{AGENT_PORT}") for asked in agent.asked} == {"/v1/status"}
    finally:
        operator.kill()
