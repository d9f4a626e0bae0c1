"""What `disttrain describe` shows of a job's pods."""

from disttrain.cluster.remote import RemoteJob
from disttrain.views.describe import attempt_row, heading, pod_rows
from disttrain_api.status import Attempt, Verdict
from tests.builders import NOW, a_job, a_raw_job, a_raw_pod, ended, running, with_sidecar


def test_a_pods_state_is_that_of_its_program() -> None:
    job = a_job(workers={"replicas": 6})
    pods = [a_raw_pod(job, index=index) for index in range(6)]
    pods[1] = running(pods[1])
    pods[2], pods[3] = ended(pods[2], 0), ended(pods[3], 3)
    pods[4], pods[5] = with_sidecar(ended(pods[4], 0)), with_sidecar(ended(pods[5], 3))
    states = [row[3] for row in pod_rows(RemoteJob(a_raw_job(workers={"replicas": 6})), pods, NOW)]
    assert states == ["waits", "runs", "done", "failed", "done", "failed"]


def test_a_job_that_runs_says_when_its_last_step_was() -> None:
    progress = {
        "step": 4,
        "totalSteps": 9,
        "lastStepTime": "2026-01-01T11:59:20Z",
        "updateTime": "2026-01-01T12:00:00Z",
    }
    raw = a_raw_job()
    raw["status"] = {"progress": progress}
    assert dict(heading(RemoteJob(raw), NOW))["Progress"] == "step 4/9 (44%)  last step 40s ago"
    raw["status"]["completionTime"] = "2026-01-01T12:00:00Z"
    assert dict(heading(RemoteJob(raw), NOW))["Progress"] == "step 4/9 (44%)"


def test_an_attempt_says_how_often_its_ranks_were_restarted_in_place_and_why() -> None:
    attempt = Attempt(number=1, start_time="2026-01-01T12:00:00Z", restarts_in_place=1, last_restart_in_place="it fell")
    assert (
        attempt_row(attempt, NOW)[-1] == "it is under way; ranks were restarted in place 1 time, last because it fell"
    )
    ended = attempt.model_copy(update={"verdict": Verdict(reason="RankFailed", message="rank 0 raised")})
    assert attempt_row(ended, NOW)[-1] == "rank 0 raised; ranks were restarted in place 1 time, last because it fell"
    never = Attempt(number=1, start_time="2026-01-01T12:00:00Z")
    assert attempt_row(never, NOW)[-1] == "it is under way"
