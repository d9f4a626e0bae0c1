"""What the operator is measured beside: jobs that run, by the operator's own code, and agents that it understands."""

import hashlib
import hmac
from datetime import UTC, datetime
from typing import Any

import orjson

from benchmarks.simulated_agents import RANKS
from benchmarks.simulated_cluster import NAMESPACES, Cluster, running_job
from disttrain_api.agent_token import agent_token
from disttrain_api.names import HOST_AGENT_PORTS
from disttrain_api.report import decode_agent_status
from disttrain_operator.agent_client import agent_of, live_of
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import Admission, Observed, job_facts
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.kept_pod import keep_pod, read_pod
from disttrain_operator.snapshot import core_collection, job_collection

HOST, PORT, KEY = "10.0.0.7", HOST_AGENT_PORTS[0], b"0" * 64


def decoded(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(text)
    return found


def test_a_simulated_job_runs_and_nothing_is_to_be_done_for_it() -> None:
    raw, pods, service = running_job(3, HOST, PORT)
    seen = tuple(filter(None, (pod_facts(read_pod(keep_pod(pod)), gone=False) for pod in pods)))
    assert len(seen) == 3
    services = frozenset({service["metadata"]["name"]})
    observed = Observed(pods=seen, services=services, admission=Admission())
    decision = decide(job_facts(raw), observed, datetime.now(UTC))
    assert (raw["status"]["phase"], decision.actions) == ("Running", ())


def test_its_agent_answers_the_operator_with_the_step_of_now() -> None:
    cluster = Cluster(NAMESPACES + 1, 2, KEY, HOST, PORT)
    jobs = [decoded(text) for text in cluster.objects(job_collection(None))]
    pods = [decoded(text) for text in cluster.objects(core_collection("pods", None))]
    assert (len(jobs), len(pods)) == (NAMESPACES + 1, 2 * (NAMESPACES + 1))
    last = jobs[-1]["metadata"]
    assert last["namespace"] == jobs[0]["metadata"]["namespace"] != jobs[1]["metadata"]["namespace"]
    agent = agent_of(last["uid"], keep_pod(pods[-2]))
    assert agent is not None
    assert (agent.host, agent.port, agent.index) == (HOST, PORT, 0)
    token = agent_token(hmac.new(KEY, last["uid"].encode(), hashlib.sha256).hexdigest()).encode()
    cluster.began -= 100
    answer = cluster.answer(token)
    assert answer is not None
    status = decode_agent_status(answer)
    live = live_of(agent, status)
    assert status is not None
    assert live is not None
    assert live.report is not None
    assert (len(status.ranks), live.report.step // 1000) == (RANKS, 1)
    assert cluster.answer(b"another") is None


def test_a_status_is_taken_from_who_knows_the_newest_version_alone() -> None:
    cluster = Cluster(1, 1, KEY, HOST, PORT)
    (path,) = cluster.jobs
    version = cluster.jobs[path]["metadata"]["resourceVersion"]
    body = {"metadata": {"resourceVersion": version}, "status": {"progress": {"step": 1}}}
    code, text = cluster.write(path, body)
    assert (code, decoded(text)["status"]) == (200, body["status"])
    assert cluster.write(path, body)[0] == 409
    assert (cluster.figures.writes, cluster.figures.conflicts, len(cluster.figures.delays)) == (1, 1, 1)
