"""The Python clients: the same calls on a cluster, with asyncio, and on this machine."""

import base64
import doctest
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

import disttrain
from disttrain import AsyncClient, Client, CommandError, LocalClient
from disttrain.local.folder import RunFolder, new_run
from disttrain_agent.checkpoint_request import checkpoint_request_file
from disttrain_agent.environment import report_dir
from disttrain_api import parse
from disttrain_api.errors import ManifestError
from tests.builders import a_job, a_manifest, a_raw_pod, ended
from tests.forward_proxy import ForwardProxy
from tests.unit.cli.fake_api import JOBS, FakeApi, a_condition
from tests.waiting import GENEROUS


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return tmp_path / "kubeconfig"


def test_every_name_of_the_package_is_there_and_no_other() -> None:
    assert [name for name in disttrain.__all__ if getattr(disttrain, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = disttrain.absent


@pytest.mark.parametrize("module", ["client", "async_client", "local_client"])
def test_the_examples_in_the_docstrings_are_read(module, tmp_path, monkeypatch, kubeconfig):
    """Lines that need a cluster or minutes are skipped; what they call exists, as the tests below show."""
    monkeypatch.chdir(tmp_path)
    with FakeApi() as api:
        api.kubeconfig(kubeconfig)
        found = doctest.testmod(__import__(f"disttrain.{module}", fromlist=["x"]))
    assert (found.failed, found.attempted > 0) == (0, True)


async def test_asyncio_awaits_the_same_calls(kubeconfig: Path) -> None:
    with FakeApi() as api:
        api.kubeconfig(kubeconfig, namespace="default")
        client = AsyncClient()
        job = await client.submit({**a_manifest(), "metadata": {"name": "digits", "uid": a_job().uid}})
        assert [found.name for found in await client.list()] == [job.name]
        assert (await client.suspend("digits")).suspend
        assert not (await client.resume("digits")).suspend
        assert api.validated == ["fieldValidation=Strict"] * 3, "nothing is left out in silence"
        api.put_pod(
            ended(a_raw_pod(a_job()), 0), "2026-01-01T12:00:00Z [rank 0] one", "2026-01-01T12:00:01Z [rank 0] two"
        )
        assert [line async for line in client.logs("digits")] == ["[rank 0] one", "[rank 0] two"]
        status = {"conditions": [a_condition("Finished")]}
        api.put_job({"metadata": {"name": "digits", "namespace": "default"}, "status": status})
        assert (await client.wait("digits", timeout=GENEROUS)).finished
        assert [seen.finished async for seen in client.follow("digits")] == [True]
        await client.delete("digits")
        with pytest.raises(CommandError, match="not found"):
            await client.get("digits")


def test_the_namespace_of_the_client_wins_over_the_manifests(kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(a_manifest()))
    with FakeApi() as api:
        api.kubeconfig(kubeconfig)
        Client(namespace="team-a").submit(tmp_path / "job.yaml")
        assert [*api.objects] == [f"{JOBS.format('team-a')}/digits"]


def test_a_name_is_left_to_the_api_server(kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(a_manifest() | {"metadata": {"generateName": "sweep-"}}))
    with FakeApi() as api:
        api.kubeconfig(kubeconfig)
        job = Client().submit(tmp_path / "job.yaml")
        assert (job.name, [*api.objects]) == ("sweep-2b4d6", [f"{JOBS.format('default')}/sweep-2b4d6"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"metadata": {}}, "metadata.name"),
        ({"metadata": None}, "metadata"),
        ({"spec": {"workers": {"replicas": 1, "imgae": "x"}}}, "spec.workers.imgae"),
        ({"spec": {"workers": {"replicas": "2"}}}, "spec.workers.replicas"),
        ({"spec": {"workers": {}, "runPolicy": {"suspend": True}}}, "spec.runPolicy.suspend: .*`spec.suspend` now"),
    ],
)
def test_a_dict_that_is_no_job_is_not_sent(kubeconfig: Path, wrong: dict[str, object], message: str) -> None:
    with FakeApi() as api:
        api.kubeconfig(kubeconfig, namespace="default")
        with pytest.raises(ManifestError, match=rf"(?m)^manifest: {message}"):
            Client().submit(a_manifest() | wrong)
        assert Client().list() == []


def test_a_job_of_a_program_that_cannot_run_is_refused_and_not_sent(kubeconfig: Path) -> None:
    job = parse(json.dumps(a_manifest()))
    wrong = job.model_copy(update={"spec": job.spec.model_copy(update={"training": None})})
    with FakeApi() as api:
        api.kubeconfig(kubeconfig)
        with pytest.raises(ManifestError, match=r"^manifest: spec"):
            Client().submit(wrong)
        assert api.validated == []


def test_on_this_machine_each_job_has_a_name_of_its_own(tmp_path: Path) -> None:
    manifest = parse(json.dumps(a_manifest() | {"metadata": {"generateName": "sweep-"}}))
    names = {new_run(tmp_path, manifest)[1]["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch("sweep-[b-z2-9]{5}", name) for name in names)
    assert sorted(path.name[:-6] for path in tmp_path.iterdir()) == sorted(names)
    assert {RunFolder(path).read_job()["metadata"]["name"] for path in tmp_path.iterdir()} == names


def test_on_this_machine_a_job_is_submitted_waited_for_and_read(tmp_path: Path) -> None:
    client = LocalClient(runs=tmp_path / "runs")
    workers = {"replicas": 2, "command": ["sh", "-c", "echo one; echo from $NODE_RANK"]}
    job = client.submit(a_manifest("own", workers=workers, training=None))
    assert (job.name, job.finished) == ("own", False)
    done = client.wait("own", timeout=GENEROUS)
    assert (done.uid, done.phase) == (job.uid, "Succeeded")
    assert sorted(client.logs("own", tail=1)) == ["from 0", "from 1"]
    assert list(client.logs("own", attempt=2)) == []
    with pytest.raises(CommandError, match="no job other in "):
        client.get("other")


def test_on_this_machine_a_job_can_be_stopped(tmp_path: Path) -> None:
    client = LocalClient(runs=tmp_path)
    client.submit(a_manifest("own", workers={"replicas": 1, "command": ["sleep", "1000"]}, training=None))
    with pytest.raises(TimeoutError, match="own has not finished within 0 s"):
        client.wait("own", timeout=0)
    client.delete("own")
    with pytest.raises(CommandError, match="own did not come to an end: it was stopped"):
        client.wait("own")


def test_on_this_machine_a_job_that_does_not_run_takes_no_request_for_a_checkpoint(unstarted: LocalClient) -> None:
    """Its last ranks have left the file by which those that run are asked."""
    job = unstarted.submit(a_manifest("asked"))
    (folder,) = unstarted._runs.iterdir()
    file = checkpoint_request_file(report_dir(folder / "pods" / "worker-0"))
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(CommandError, match=r"asked cannot be asked for a checkpoint: it does not run \(Pending\)"):
        unstarted.checkpoint(job.name)


AMBIGUOUS_SCALARS = [
    "3e-4",
    "0o14",
    "012",
    "on",
    "1_000",
    "null",
    "~",
    "=",
    "2026-01-01",
    "é\u202e",
    "a: b",
    "\x1b[2J",
    "",
]


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LocalClient:
    monkeypatch.setattr(LocalClient, "_start", lambda *_: None)
    return LocalClient(runs=tmp_path / "runs")


def test_on_this_machine_a_dict_is_taken_as_it_is(unstarted: LocalClient) -> None:
    """Not as YAML would read what it is written as."""
    env = [{"name": f"W{number}", "value": word} for number, word in enumerate(AMBIGUOUS_SCALARS)]
    manifest = a_manifest(
        "own", workers={"replicas": 1, "command": ["true", *AMBIGUOUS_SCALARS], "env": env}, training=None
    )
    stored = unstarted.submit(manifest).raw["spec"]["workers"]
    assert (stored["command"], stored["env"]) == (["true", *AMBIGUOUS_SCALARS], env)


@pytest.mark.parametrize("odd", [{1, 2}, object(), float, Path("x")], ids=lambda odd: type(odd).__name__)
def test_on_this_machine_what_is_no_json_is_refused_in_a_sentence(unstarted: LocalClient, odd: object) -> None:
    with pytest.raises(ManifestError, match=r"^manifest: is no JSON: "):
        unstarted.submit(a_manifest(workers={"env": odd}))


def test_on_this_machine_a_wrong_job_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="stepz"):
        LocalClient(runs=tmp_path / "runs").submit(a_manifest(training={"stepz": 1}))
    assert not (tmp_path / "runs").exists()


def test_a_plain_server_is_asked_through_a_proxy(kubeconfig: Path) -> None:
    with FakeApi() as api, ForwardProxy(("127.0.0.1", urlsplit(api.url).port or 0)) as proxy:
        api.url = "http://kube.example.test"
        api.kubeconfig(kubeconfig)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:word@"))
            assert disttrain.Client().list() == []
    ((asked, credentials),) = proxy.asked
    assert asked.startswith("GET http://kube.example.test/apis/disttrain.io/")
    assert credentials == f"Basic {base64.b64encode(b'me:word').decode()}"
