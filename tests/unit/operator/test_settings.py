"""Flags and environment, and what the probes say."""

import asyncio
from pathlib import Path

import pytest

from disttrain_operator.__main__ import Operator
from disttrain_operator.health import FAILING_SECONDS, HUNG_SECONDS, STUCK_SECONDS, Health
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.informer import Informer
from disttrain_operator.lag import LoopLag
from disttrain_operator.settings import Settings, read_settings
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal


def test_nothing_given_is_the_defaults() -> None:
    assert read_settings([], {}) == Settings()


def test_a_flag_wins_over_its_variable() -> None:
    environment = {"DISTTRAIN_TRAINER_IMAGE": "variable", "DISTTRAIN_NAMESPACE": "team", "DISTTRAIN_JSON_LOGS": "true"}
    settings = read_settings(["--trainer-image=flag", "--token-key-file=/key", "--grace-seconds=5"], environment)
    assert (settings.trainer_image, settings.namespaces, settings.json_logs) == ("flag", ("team",), True)
    assert (settings.token_key_file, settings.pods.grace_seconds) == (Path("/key"), 5)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("--log-level=LOUD", "must be DEBUG, INFO, WARNING or ERROR, not 'LOUD'"),
        ("--workers=0", "must be a whole number of at least 1, not '0'"),
        ("--max-in-flight=none", "must be a whole number of at least 1, not 'none'"),
        ("--gate-hold-seconds=0", "must be a whole number of at least 1, not '0'"),
        ("--health-port=65536", "must be a whole number from 0 to 65535, not '65536'"),
        ("--grace-seconds=-1", "must be a whole number of at least 0, not '-1'"),
        ("--request-timeout-seconds=0", "must be a number of more than 0, not '0'"),
        ("--watch-silence-seconds=nan", "must be a number of more than 0, not 'nan'"),
        ("--progress-per-second=0", "must be a number of more than 0, not '0'"),
        ("--progress-interval-seconds=-0.5", "must be a number of at least 0, not '-0.5'"),
        ("--user-id=me", "must be a number from 1 to 2147483647, or empty, not 'me'"),
        ("--user-id=0", "must be a number from 1 to 2147483647, or empty, not '0'"),
        ("--lease-duration-seconds=1", "must be a whole number from 2 to 120, not '1'"),
        ("--lease-namespace=,", "must name a namespace, not ','"),
        ("--token-key-secret=tokens", "must be namespace/name, not 'tokens'"),
        ("--token-key-secret=/tokens", "must be namespace/name, not '/tokens'"),
        ("--token-key-secret=ops/", "must be namespace/name, not 'ops/'"),
        ("--token-key-secret=ops/to/kens", "must be namespace/name, not 'ops/to/kens'"),
        ("--token-key-secret=../tokens", "must be namespace/name, not '../tokens'"),
        ("--token-key-secret=ops/tokens?a", "must be namespace/name, not 'ops/tokens?a'"),
        ("--namespace=team,..", "'..' is no name: lower case letters, digits, dashes and dots"),
        ("--lease-namespace=team/secrets", "'team/secrets' is no name"),
        ("--lease-name=a/../b", "'a/../b' is no name"),
        ("--cluster-lease-namespace=a?b=c", "'a?b=c' is no name"),
        ("--agent-access=Proxy", "must be Auto or PodIP or ApiServer, not 'Proxy'"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_wrong_flag_or_variable_ends_with_a_sentence(wrong, sentence, capsys):
    name, _, value = wrong.partition("=")
    variable = "DISTTRAIN_" + name.removeprefix("--").upper().replace("-", "_")
    for given in ([wrong], {}), ([], {variable: value}):
        if value or given[0]:
            with pytest.raises(SystemExit):
                read_settings(*given)
            output = capsys.readouterr().err
            assert name in output
            assert sentence in output


def test_a_user_that_is_left_to_the_cluster_is_none() -> None:
    assert read_settings(["--user-id="], {"DISTTRAIN_USER_ID": "7"}).pods.user_id is None
    assert read_settings([], {"DISTTRAIN_USER_ID": "7"}).pods.user_id == 7
    assert read_settings(["--user-id=1000620000"], {}).pods.user_id == 1000620000


def test_the_gate_needs_an_operator_of_all_namespaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_settings(["--gang-gate"], {}).gang_gate
    assert read_settings(["--gate-hold-seconds=60"], {}).gate_hold_seconds == 60
    with pytest.raises(SystemExit):
        read_settings(["--gang-gate", "--namespace=team"], {})
    assert "needs an operator that serves all namespaces" in capsys.readouterr().err


def test_the_key_is_in_a_secret_or_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_settings(["--token-key-secret=ops/tokens"], {}).token_key_secret == "ops/tokens"
    with pytest.raises(SystemExit):
        read_settings(["--token-key-secret=ops/tokens", "--token-key-file=/key"], {})
    assert "give only one" in capsys.readouterr().err


async def test_ready_is_synced_and_healthy_is_trying(client: Client) -> None:
    now = [0.0]
    lag = LoopLag()
    lag.ticked_at = 0.0
    informer = Informer(client, "/api/v1/pods", Cache(group_of=lambda raw: "all"), clock=lambda: now[0])
    health = Health([informer], lag, clock=lambda: now[0])
    assert (health.healthy, health.ready) == (True, False)
    informer.cache.replace([], 1)
    assert health.ready
    informer.tried_at = now[0]
    now[0] = lag.ticked_at = STUCK_SECONDS + 1
    assert not health.healthy
    informer.tried_at = now[0]
    assert health.healthy
    lag.ticked_at -= HUNG_SECONDS
    assert not health.healthy, "the loop hangs"


async def test_an_informer_that_has_not_begun_yet_is_not_stuck(client: Client) -> None:
    """It begins when what it waits for is there: the CRD, or the list of jobs."""
    now = [0.0]
    lag = LoopLag()
    informer = Informer(client, "/api/v1/pods", Cache(group_of=lambda raw: "all"), clock=lambda: now[0])
    health = Health([informer], lag, clock=lambda: now[0])
    now[0] = lag.ticked_at = 10 * STUCK_SECONDS
    assert health.healthy


async def test_an_operator_that_waits_for_its_crd_measures_its_loop(api, client, caplog):
    """Else /healthz would take the loop for hung, and the kubelet would start the operator again and again."""
    api.refusals.append(lambda method, *_: refusal(404, "") if method == "GET" else None)
    operator = Operator(Settings(health_address="127.0.0.1", health_port=0), client, None, b"key")
    task = asyncio.create_task(operator.prepare())
    try:
        await eventually(lambda: "is not installed" in caplog.text)
        before = operator._lag.ticked_at
        await eventually(lambda: operator._lag.ticked_at > before)
        assert operator.health.healthy
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await operator.close()


async def test_an_informer_that_is_answered_and_fails_for_minutes_is_ill(api: FakeApi, client: Client) -> None:
    now, answers = [0.0], {"code": 403}
    api.refusals.append(lambda method, *_: refusal(answers["code"], "No") if answers["code"] else None)
    lag = LoopLag()
    informer = Informer(client, "/api/v1/pods", Cache(group_of=lambda raw: "all"), clock=lambda: now[0])
    health = Health([informer], lag, clock=lambda: now[0])
    task = asyncio.create_task(informer.run())

    def pass_by(seconds: float) -> None:
        now[0] += seconds
        lag.ticked_at = now[0]

    async def another_try() -> None:
        asked = len(api.requests)
        await eventually(lambda: len(api.requests) > asked + 1)

    await eventually(lambda: informer.failing_since is not None)
    pass_by(FAILING_SECONDS - 1)
    await another_try()
    assert health.healthy
    pass_by(1)
    await another_try()
    assert not health.healthy
    answers["code"] = 503
    await eventually(lambda: informer.failing_since is None)
    assert health.healthy, "a server that is away is no illness"
    answers["code"] = 403
    await eventually(lambda: informer.failing_since is not None)
    answers["code"] = 0
    await eventually(lambda: informer.synced and informer.failing_since is None)
    pass_by(FAILING_SECONDS - 1)
    assert health.healthy
    task.cancel()


def test_template_defaults_are_read_and_checked_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text("nodeSelector: {pool: gpu}\n")
    assert read_settings([f"--pod-defaults-file={file}"], {}).pods.template == {"nodeSelector": {"pool": "gpu"}}
    assert read_settings([], {"DISTTRAIN_POD_DEFAULTS_FILE": str(file)}).pods.template
    file.write_text("nodeSelector: gpu\n")
    for wrong in (file, tmp_path / "absent.yaml"):
        with pytest.raises(SystemExit):
            read_settings([f"--pod-defaults-file={wrong}"], {})
    output = capsys.readouterr().err
    assert "defaults.yaml: nodeSelector: " in output
    assert "absent.yaml" in output
