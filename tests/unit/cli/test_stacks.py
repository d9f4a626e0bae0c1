"""`disttrain stacks`: agents are asked through the API server, with what the job's Secret holds."""

import base64
import json
from typing import Any

import pytest

from disttrain.client import Client
from disttrain.errors import CommandError
from disttrain.main import main
from disttrain_api.agent_token import agent_token
from disttrain_api.names import AGENT_PORT, TOKEN_FILE, Env, Role
from disttrain_api.stacks import MAX_WHOLE_STACKS_BYTES, STOPPED
from disttrain_operator.plan.desired import GangPlan
from disttrain_operator.plan.identity import secret_name
from disttrain_operator.plan.site import Site
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, ended, running
from tests.unit.cli.fake_api import FakeApi, a_condition

TOKEN = "the-token-of-the-job"
SECRETS = "/api/v1/namespaces/default/secrets"
SECRET = secret_name("digits", UID, TOKEN)
REDUCE = """Current thread 0x7e (most recent call first):
  File "/x/torch/distributed/c10d.py", line 28 in all_reduce
  File "/x/step.py", line 9 in step
"""
OTHER = 'Thread 0x7f (most recent call first):\n  File "/x/pool.py", line 1 in run'
RUNNING = {"attempt": 1, "worldSize": 2, "phase": "Running", "conditions": [a_condition("Running")]}
LOADING = REDUCE.replace("/x/torch/distributed/c10d.py", "/home/me/mine.py").replace("all_reduce", "__getitem__")


def a_pod(index: int) -> dict[str, Any]:
    """A pod as the operator makes it."""
    job = a_job()
    made = GangPlan(job, 1, Site(trainer_image="x", token=TOKEN)).pod(Role.WORKER, index)
    return running(a_raw_pod(job, index=index) | {"spec": made["spec"]})


def path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}%3A{AGENT_PORT}/proxy/v1/stacks"


@pytest.fixture
def pods(api: FakeApi) -> list[dict[str, Any]]:
    """A job of two pods of a rank each, whose second rank loads a sample."""
    api.put_job(a_raw_job(status=RUNNING))
    api.put(SECRETS, {"metadata": {"name": SECRET}, "data": {TOKEN_FILE: base64.b64encode(TOKEN.encode()).decode()}})
    found = [a_pod(index) for index in range(2)]
    for index, (pod, text) in enumerate(zip(found, (REDUCE, LOADING), strict=True)):
        api.put_pod(pod)
        api.answers[path(pod)] = (200, {"stacks": {str(index): text}})
    return found


@pytest.mark.usefixtures("pods")
def test_each_rank_is_a_line_and_the_one_that_others_wait_for_is_named(
    api: FakeApi, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["stacks", "digits"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == [
        "[rank 0] all_reduce (c10d.py:28) < step (step.py:9)",
        "[rank 1] __getitem__ (mine.py:28) < step (step.py:9)",
    ]
    assert lines[2].startswith("rank 1 is in __getitem__ (mine.py:28)")
    assert api.agent_tokens == [agent_token(TOKEN)] * 2
    assert {asked.split()[0] for asked in api.asked} == {"GET"}


def test_the_threads_of_some_ranks_are_shown_whole(
    api: FakeApi, pods: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    api.answers[path(pods[1])] = (200, {"stacks": {"0": "not its own", "1": f"{OTHER}\n\n{LOADING}\x1b[31m"}})
    assert main(["stacks", "digits", "--rank", "1"]) == 0
    assert capfd.readouterr().out == f"--- rank 1 ---\n{LOADING}\\x1b[31m\n\n{OTHER}\n"
    assert main(["stacks", "digits", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"stacks": {"0": REDUCE.strip(), "1": f"{LOADING}\x1b[31m\n\n{OTHER}"}}


def test_a_pod_that_gives_none_is_named_beside_those_that_do(
    api: FakeApi, pods: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Red where an agent's refusal passes for one of the credentials, or hides what other pods have answered."""
    api.answers[path(pods[0])] = (401, {"error": "the header must hold the token"})
    assert main(["stacks", "digits"]) == 0
    said = capfd.readouterr()
    assert said.out == "[rank 1] __getitem__ (mine.py:28) < step (step.py:9)\n"
    assert said.err == f"disttrain: pod {pods[0]['metadata']['name']}: the header must hold the token\n"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((503, "dial tcp: refused"), "503 "),
        ((200, {"stacks": {"7": "a rank of others"}}), "its ranks give no stacks now"),
        ((200, {"stacks": {"0": STOPPED, "extra": 1}}), "its ranks give no stacks now"),
        ((200, "x" * (MAX_WHOLE_STACKS_BYTES + 1)), f"the answer is larger than {MAX_WHOLE_STACKS_BYTES} bytes"),
        ((403, {"message": 'pods "x" is forbidden: ann cannot get pods/proxy'}), "ann cannot get pods/proxy"),
    ],
)
def test_whatever_a_pod_answers_is_a_sentence(api, pods, capfd, answer, sentence):
    for pod in pods:
        api.answers[path(pod)] = answer
    assert main(["stacks", "digits", "--rank", "0"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert sentence in lines[0]
    assert lines[1:] == ["disttrain: no rank of digits gave its stacks"]


def test_a_command_of_ones_own_that_does_not_answer_may_not_have_reported_yet(
    api: FakeApi, pods: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    for pod in pods:
        api.answers[path(pod)] = (503, "dial tcp: refused")
    api.put_job(a_raw_job() | {"spec": {"training": None}})
    assert main(["stacks", "digits"]) == 1
    assert "has an agent from its first `disttrain.report`" in capfd.readouterr().err


@pytest.mark.usefixtures("pods")
def test_a_refusal_to_read_the_secret_says_what_it_is_for(api: FakeApi) -> None:
    api.answers[f"{SECRETS}/{SECRET}"] = (403, {"message": "ann cannot get secrets"})
    with pytest.raises(CommandError, match=r"has the token of the job's agents: ann cannot get secrets"):
        Client().stacks("digits")
    api.answers[f"{SECRETS}/{SECRET}"] = (200, {"data": {TOKEN_FILE: "%"}})
    with pytest.raises(CommandError, match="`token` is no token"):
        Client().stacks("digits")
    assert api.agent_tokens == []


def test_pods_without_a_rank_that_runs_are_not_asked(api: FakeApi, pods: list[dict[str, Any]]) -> None:
    api.put_pod(ended(pods[0], 0))
    with pytest.raises(CommandError, match="no worker of digits with these ranks runs now"):
        Client().stacks("digits", ranks={0})
    assert set(Client().stacks("digits").found) == {1}


@pytest.mark.parametrize("port", ["22", "0", "-1", "x", "²", "9" * 5000])
def test_a_pod_leads_to_no_other_port(api: FakeApi, pods: list[dict[str, Any]], port: str) -> None:
    (entry,) = [one for one in pods[0]["spec"]["containers"][0]["env"] if one["name"] == Env.AGENT_PORT]
    entry["value"] = port
    api.put_pod(pods[0])
    with pytest.raises(CommandError, match="the pods of digits have no agent"):
        Client().stacks("digits", ranks={0})


@pytest.mark.parametrize("first", [REDUCE, None], ids=["both are known", "one does not answer"])
def test_two_ranks_in_different_calls_wait_for_each_other_where_both_are_known(
    api: FakeApi, pods: list[dict[str, Any]], capfd: pytest.CaptureFixture[str], first: str | None
) -> None:
    barrier = REDUCE.replace("all_reduce", "barrier")
    api.answers[path(pods[1])] = (200, {"stacks": {"1": barrier}})
    api.answers[path(pods[0])] = (200, {"stacks": {} if first is None else {"0": first}})
    assert main(["stacks", "digits"]) == 0
    both = (
        "rank 0 waits in all_reduce (c10d.py:28) < step (step.py:9), and rank 1 waits in barrier (c10d.py:28) < "
        "step (step.py:9): they wait for each other"
    )
    assert (both in capfd.readouterr().out) is (first is not None)
