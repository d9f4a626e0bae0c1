"""The verbs that look at jobs and change them, against a small API server."""

import json
import re
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

import disttrain.jobs
from disttrain.main import main
from disttrain_api.names import CHECKPOINT_REQUEST
from disttrain_api.times import timestamp
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, ended, running
from tests.unit.cli.fake_api import JOBS, FakeApi, a_condition
from tests.waiting import GENEROUS

EVIL = "\x1b]0;owned\x07 [bold]not bold[/bold] \u202eback\r\n\x9b31m"


def a_status(*holding: str, **more: Any) -> dict[str, Any]:
    phase = {"Complete": "Succeeded"}.get(holding[0], holding[0]) if holding else "Pending"
    attempt = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "runningTime": "2026-01-01T12:00:10Z"}
    base = {"phase": phase, "attempt": 1, "worldSize": 2, "mesh": "dp2", "ready": "2/2", "attempts": [attempt]}
    return base | {"conditions": [a_condition(type_) for type_ in holding]} | more


def said_lines(api: FakeApi, pod: dict[str, Any], *lines: str) -> None:
    api.put_pod(pod, *(f"2026-01-01T12:00:{at:02}.5Z {line}" for at, line in enumerate(lines)))


def output_of(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints on standard output."""
    assert main(arguments) == code
    return capfd.readouterr().out


def test_jobs_are_rows_with_their_progress(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    progress = {"step": 42, "totalSteps": 100, "loss": 0.25, "updateTime": "2026-01-01T12:00:00Z"}
    api.put_job(a_raw_job(status=a_status("Running", progress=progress)))
    api.put_job(a_raw_job("fresh"))
    heading, first, second = output_of(capfd, "list").splitlines()
    assert heading.split() == ["NAME", "PHASE", "MESH", "READY", "PROGRESS", "LOSS", "RESTARTS", "AGE"]
    assert first.split()[:7] == ["digits", "Running", "dp2", "2/2", "42/100", "(42%)", "0.25"]
    assert second.split()[:3] == ["fresh", "Pending", "-"]
    assert "default" in output_of(capfd, "list", "-A", "-o", "wide")


def test_no_jobs_are_no_error(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capfd.readouterr() == ("", "no jobs in namespace default\n")


def test_json_and_yaml_are_what_the_api_server_holds(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status={"phase": EVIL}) | {})
    read = json.loads(output_of(capfd, "get", "digits", "-o", "json"))
    assert (read["metadata"]["uid"], read["status"]["phase"]) == (UID, EVIL)
    text = output_of(capfd, "list", "-o", "yaml")
    assert text.isascii()
    assert yaml.safe_load(text)["items"][0]["status"]["phase"] == EVIL


def test_a_thousand_jobs_are_read_page_by_page(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    path = JOBS.format("default")
    api.answers[path] = (200, {"items": [a_raw_job("one")], "metadata": {}})
    output_of(capfd, "list")
    assert f"GET {path}?limit=500" in api.asked


def an_entry(name: str, at: str, **more: Any) -> tuple[str, str]:
    """Key and text of a finished job in the history."""
    entry = {"name": name, "namespace": "forged", "uid": "u", "phase": "Failed", "completionTime": at} | more
    return f"{re.sub('[-:]', '', at)}.u-{name}", json.dumps(entry)


def put_history(api: FakeApi, namespace: str, *entries: tuple[str, str]) -> None:
    metadata = {"name": "disttrain-history", "namespace": namespace}
    api.put(f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": metadata, "data": dict(entries)})


def test_the_history_shows_finished_jobs_also_deleted_ones(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    assert capfd.readouterr() == ("", "no finished jobs are known of namespace default\n")
    progress = {"step": 42, "totalSteps": 100, "loss": 0.25, "updateTime": "2026-01-01T12:00:00Z"}
    more = {"reason": "TooManyRestarts", "progress": progress, "creationTime": "2026-01-01T11:00:00Z"}
    failed = an_entry("old", "2026-01-01T12:00:00Z", message=EVIL, **more)
    put_history(api, "default", failed, an_entry("new", "2026-01-02T12:00:00Z", phase="Succeeded"))
    put_history(api, "other", an_entry("third", "2026-01-01T13:00:00Z"))
    heading, first, second = output_of(capfd, "history").splitlines()
    assert heading.split() == ["NAME", "PHASE", "REASON", "PROGRESS", "LOSS", "GOODPUT", "TOOK", "FINISHED"]
    assert first.split()[:3] == ["new", "Succeeded", "-"]
    assert second.split()[:8] == ["old", "Failed", "TooManyRestarts", "42/100", "(42%)", "0.25", "-", "60m"]
    everywhere = output_of(capfd, "history", "-A").splitlines()[1:]
    assert [line.split()[:2] for line in everywhere] == [["default", "new"], ["other", "third"], ["default", "old"]]
    assert "fieldSelector=metadata.name%3Ddisttrain-history" in api.asked[-1]
    wide = output_of(capfd, "history", "old", "-o", "wide")
    assert "\x1b" not in wide
    assert "\\x1b]0;owned" in wide
    assert [entry["name"] for entry in json.loads(output_of(capfd, "history", "-o", "json"))["items"]] == ["new", "old"]


def test_why_says_what_became_of_a_job_that_was_deleted(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = {"reason": "RankFailed", "message": "rank 3 failed"}
    put_history(api, "default", an_entry("gone", "2026-01-01T12:00:00Z", message="it failed.", verdict=verdict))
    said = output_of(capfd, "why", "gone")
    assert re.fullmatch(
        r"default/gone finished \w+ ago \(Failed\): it failed. It was deleted since then. rank 3 failed.\n", said
    )
    document = json.loads(output_of(capfd, "why", "gone", "-o", "json"))
    assert document["why"].startswith("default/gone finished ")
    assert (document["whatToDo"], document["next"]) == ([], ["disttrain history gone -o wide"])
    assert main(["why", "another"]) == 1


def test_why_is_also_a_document(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = {"reason": "OOMKilled", "message": "rank 1 ran out of memory", "class": "OutOfMemory"}
    attempt = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "endTime": "2026-01-01T12:01:00Z", "verdict": verdict}
    failed = a_condition("Failed", "True", "OOMKilled", "rank 1 ran out of memory")
    api.put_job(a_raw_job(status=a_status("Failed", attempts=[attempt], conditions=[failed])))
    paragraph, todo = output_of(capfd, "why", "digits").split("\n\nWhat to do: ")
    document = json.loads(output_of(capfd, "why", "digits", "-o", "json"))
    assert document["why"].split() == paragraph.split()
    assert " ".join(f"{sentence}." for sentence in document["whatToDo"]).split() == todo.split()
    assert document["next"] == ["disttrain describe digits"]
    assert yaml.safe_load(output_of(capfd, "why", "digits", "-o", "yaml")) == document


@pytest.mark.parametrize("verb", ["get", "describe", "why", "logs", "events", "suspend", "resume", "restart", "delete"])
def test_a_job_that_is_not_there_is_one_sentence(api: FakeApi, verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "absent"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == 'disttrain: cannot read default/absent: disttrainingjobs.disttrain.io "absent" not found\n'


@pytest.mark.parametrize("name", ["../pods", "a/b", "A", "-a", "a?watch=true", "a b"])
def test_a_name_that_cannot_be_is_usage(api: FakeApi, name: str) -> None:
    assert main(["get", "--", name]) == 2
    assert api.asked == []


def test_a_page_says_where_the_time_went_until_now(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    spent = [{"state": "Starting", "seconds": 3600}, {"state": "Training", "seconds": 0}]
    began = datetime.now(UTC) - timedelta(hours=3, seconds=1)
    goodput = {"since": "2026-01-01T12:00:00Z", "updateTime": timestamp(began), "state": "Training", "spent": spent}
    api.put_job(a_raw_job(status=a_status("Running", goodput=goodput)))
    assert re.search(r"Goodput: +75% of 4h \(training 3h, starting 60m\)", output_of(capfd, "describe", "digits"))


def test_a_page_names_a_slow_rank(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running", "Straggling")))
    assert re.search(r"Straggler: +it is so", output_of(capfd, "describe", "digits"))
    api.put_job(a_raw_job(status=a_status("Running")))
    assert "Straggler" not in output_of(capfd, "describe", "digits")


def test_a_page_names_a_rank_that_seems_to_hang(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running", "HangSuspected")))
    assert re.search(r"Seems to hang: +it is so", output_of(capfd, "describe", "digits"))
    api.put_job(a_raw_job(status=a_status("Running")))
    assert "Seems to hang" not in output_of(capfd, "describe", "digits")


def test_a_page_draws_the_mesh_with_the_state_of_each_rank(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    job = a_job()
    parallelism = {"tensorParallelDegree": 2}
    api.put_job(a_raw_job(workers={"replicas": 2, "processesPerPod": 2}, parallelism=parallelism) | {})
    api.put_job({"metadata": {"name": "digits", "namespace": "default"}, "status": a_status("Running", worldSize=4)})
    api.put_pod(running(a_raw_pod(job, index=0)))
    text = output_of(capfd, "describe", "digits")
    drawn = [line.split() for line in text.splitlines() if line.strip().startswith("replica")]
    assert drawn == [["replica", "0", "●0", "●1"], ["replica", "1", "·2", "·3"]]


def test_logs_come_in_the_order_of_time_with_their_ranks(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    job = a_job()
    api.put_job(a_raw_job(status=a_status("Running")))
    for index in range(2):
        said_lines(api, running(a_raw_pod(job, index=index)), f"[rank {index}] \x1b[32mstep 1\x1b[0m", "[agent] x")
    out = output_of(capfd, "logs", "digits")
    assert out.splitlines() == ["[rank 0] step 1", "[rank 1] step 1", "[agent 0] x", "[agent 1] x"]
    assert output_of(capfd, "logs", "digits", "--rank", "1") == "[rank 1] step 1\n"
    assert output_of(capfd, "logs", "digits", "--tail", "1") == "[agent 0] x\n[agent 1] x\n"


def test_a_log_speaks_for_no_other_rank_nor_to_the_terminal(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running")))
    said_lines(api, running(a_raw_pod(a_job())), "[rank 7] I am rank 7", EVIL.replace("\r\n", ""), "old\rnew")
    out = output_of(capfd, "logs", "digits").splitlines()
    assert out[0] == "[rank 0] [rank 7] I am rank 7"
    assert out[1] == "[rank 0] \\x1b]0;owned\\x07 [bold]not bold[/bold] \\u202eback\\x9b31m"
    assert out[2] == "[rank 0] new"


def test_following_goes_through_a_restart_to_the_end(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    job = a_job()
    api.put_job(a_raw_job(workers={"replicas": 1}, status=a_status(attempts=[])))

    def read(log: str) -> None:
        with api.changed:
            assert api.changed.wait_for(lambda: any(log in line for line in api.asked), timeout=GENEROUS)

    def play() -> None:
        first, second = a_raw_pod(job), a_raw_pod(job, attempt=2)
        api.put_pod(first)
        said_lines(api, running(first), "[rank 0] one", "[rank 0] two")
        read("a1/log")
        api.put_pod(ended(first, 1))
        api.put_job(a_raw_job(status=a_status("Restarting", attempt=2)))
        said_lines(api, running(second), "[rank 0] three")
        api.put_pod(ended(second, 0))
        read("a2/log")
        api.put_job(a_raw_job(status=a_status("Complete", "Finished", attempt=2)))

    player = threading.Thread(target=play, daemon=True)
    player.start()
    out = output_of(capfd, "logs", "-f", "digits")
    player.join()
    assert out.splitlines() == ["[rank 0] one", "[rank 0] two", "--- attempt 2 ---", "[rank 0] three"]


@pytest.mark.parametrize(
    ("status", "options", "sentence"),
    [
        (a_status(attempts=[], attempt=0), [], "has no pods yet; `disttrain why digits` says why"),
        (a_status("Failed", "Finished"), [], "are gone, and with them their logs"),
        (a_status("Running"), ["--attempt", "7"], "the pods of attempt 7 are gone"),
        (a_status("Running"), ["--rank", "2"], "has ranks 0 to 1"),
    ],
)
def test_where_there_is_no_log_it_says_why(api, capfd, status, options, sentence):
    api.put_job(a_raw_job(status=status))
    assert main(["logs", "digits", *options]) == 1
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize("ranks", ["x", "3-1", "-1", "", "1;2", "99999999"])
def test_ranks_that_cannot_be_are_usage(api: FakeApi, ranks: str) -> None:
    assert main(["logs", "digits", f"--rank={ranks}"]) == 2


def test_suspending_and_resuming_change_one_field(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running")))
    assert "pods write a checkpoint and stop" in output_of(capfd, "suspend", "digits")
    assert "is suspended already" in output_of(capfd, "suspend", "digits")
    assert "goes on" in output_of(capfd, "resume", "digits")
    assert "is not suspended" in output_of(capfd, "resume", "digits")
    bodies = [line.split(" ", 2)[2] for line in api.asked if line.startswith("PATCH")]
    resumed = '{"spec": {"suspend": false, "runPolicy": {"suspend": null}}}'
    assert bodies == ['{"spec": {"suspend": true}}', resumed], "and the field of an earlier version goes"


def test_a_job_that_an_earlier_version_suspended_goes_on(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Suspended"), runPolicy={"suspend": True}, suspend=False))
    assert "is suspended already" in output_of(capfd, "suspend", "digits")
    assert "goes on" in output_of(capfd, "resume", "digits")
    assert "is not suspended" in output_of(capfd, "resume", "digits")


def play_operator(api: FakeApi, *holding: str) -> threading.Thread:
    """Once spec.suspend is set, write this status."""
    path = f"{JOBS.format('default')}/digits"

    def play() -> None:
        with api.changed:
            api.changed.wait_for(lambda: api.objects[path]["spec"].get("suspend"), timeout=GENEROUS)
        api.put_job({"metadata": {"name": "digits", "namespace": "default"}, "status": a_status(*holding)})

    player = threading.Thread(target=play, daemon=True)
    player.start()
    return player


def test_a_restart_waits_until_the_pods_have_ended(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running")))
    player = play_operator(api, "Suspended")
    assert [line.split(" ", 1)[1] for line in output_of(capfd, "restart", "digits").splitlines()] == [
        "is being suspended: its pods write a checkpoint and stop",
        "goes on",
    ]
    player.join()
    assert api.objects[f"{JOBS.format('default')}/digits"]["spec"]["suspend"] is False


def test_a_restart_of_a_job_that_fails_meanwhile_says_so(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running")))
    play_operator(api, "Failed", "Finished")
    assert main(["restart", "digits"]) == 1
    assert "finished before it was suspended (Failed)" in capfd.readouterr().err


def a_job_with_storage(*holding: str, **changes: Any) -> dict[str, Any]:
    return a_raw_job(**{"status": a_status(*holding), "storage": {"claimName": "kept"}, **changes})


@pytest.mark.parametrize("spec", [{}, {"training": None}, {"training": None, "storage": None}])
def test_a_checkpoint_is_asked_for_and_waited_for(
    api: FakeApi, capfd: pytest.CaptureFixture[str], spec: dict[str, None]
) -> None:
    """Whether a command of its own has a session, and where that keeps checkpoints, nobody knows before."""
    path, asked = f"{JOBS.format('default')}/digits", list[str]()
    api.put_job(a_job_with_storage("Running", **spec))

    def play() -> None:
        with api.changed:
            api.changed.wait_for(lambda: "annotations" in api.objects[path]["metadata"], timeout=GENEROUS)
            asked.append(api.objects[path]["metadata"]["annotations"][CHECKPOINT_REQUEST])
        checkpoint = {"step": 7, "path": "/checkpoints/digits/step-7", "time": "2026-11-01T00:00:00Z"}
        api.put_job(api.objects[path] | {"status": a_status("Running", checkpoint=checkpoint)})

    player = threading.Thread(target=play, daemon=True)
    player.start()
    out = output_of(capfd, "checkpoint", "digits")
    player.join()
    assert out.splitlines()[1] == "the checkpoint of step 7 is complete: /checkpoints/digits/step-7"
    output_of(capfd, "checkpoint", "digits", "--no-wait")
    assert asked[0] != api.objects[path]["metadata"]["annotations"][CHECKPOINT_REQUEST], "each request is another"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (a_job_with_storage("Complete", "Finished"), "it has finished (Succeeded)"),
        (a_job_with_storage("Suspended"), "it does not run (Suspended)"),
        (a_raw_job(status=a_status("Running")), "it has no `storage`"),
        (
            a_job_with_storage("Running", parallelism={"dataParallel": {"mode": "ParameterServer"}}),
            "with parameter servers",
        ),
    ],
)
def test_a_job_that_writes_no_checkpoint_now_is_not_asked(api, capfd, job, why):
    api.put_job(job)
    assert main(["checkpoint", "digits"]) == 1
    assert f"cannot be asked for a checkpoint: {why}" in capfd.readouterr().err
    assert not [line for line in api.asked if line.startswith("PATCH")]


@pytest.mark.parametrize("verb", ["suspend", "resume", "restart"])
def test_a_finished_job_is_not_changed(api: FakeApi, verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Complete", "Finished")))
    assert main([verb, "digits"]) == 1
    assert "has finished (Succeeded) and never starts again" in capfd.readouterr().err
    assert not [line for line in api.asked if line.startswith("PATCH")]


def test_a_job_that_runs_is_not_deleted_unasked(api: FakeApi, capfd: pytest.CaptureFixture[str]) -> None:
    api.put_job(a_raw_job(status=a_status("Running")))
    assert main(["delete", "digits"]) == 1
    assert "dtj/digits has not finished: --yes deletes without asking" in capfd.readouterr().err
    assert output_of(capfd, "delete", "digits", "--yes") == "dtj/digits deleted from namespace default\n"
    assert api.objects == {}


def test_on_a_terminal_each_verb_says_what_one_would_do_next(api, capfd, monkeypatch):
    monkeypatch.setattr(disttrain.jobs, "is_terminal", lambda: True)
    api.put_job(a_raw_job(status=a_status("Failed", "Finished")))
    for arguments in (["list"], ["get", "digits"], ["describe", "digits"], ["events", "digits"]):
        assert main(arguments) == 0
        assert "\nNext: disttrain why digits" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((401, {"message": "Unauthorized"}), "does not accept these credentials (401)"),
        ((403, {"message": "dora may not"}), "cannot read default/digits: dora may not"),
        ((404, b"404 page not found"), "the cluster does not know DistTrainingJobs; install the chart first"),
        ((500, b"<html>"), "cannot read default/digits: 500"),
        ((200, b"<html>"), "the answer is not JSON"),
        ((200, b"[]"), "the answer is not an object"),
    ],
)
def test_what_the_api_server_refuses_is_one_sentence(api, capfd, answer, sentence):
    api.answers[f"{JOBS.format('default')}/digits"] = answer
    assert main(["get", "digits"]) == 1
    err = capfd.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1
