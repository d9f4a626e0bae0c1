"""What `disttrain describe` shows of a job's pods."""

from disttrain.cluster.remote import RemoteJob
from disttrain.views.describe import pod_rows
from tests.builders import NOW, a_job, a_raw_job, a_raw_pod, ended, running, with_sidecar


def test_a_pods_state_is_that_of_its_program() -> None:
    job = a_job(workers={"replicas": 6})
    pods = [a_raw_pod(job, index=index) for index in range(6)]
    pods[1] = running(pods[1])
    pods[2], pods[3] = ended(pods[2], 0), ended(pods[3], 3)
    pods[4], pods[5] = with_sidecar(ended(pods[4], 0)), with_sidecar(ended(pods[5], 3))
    states = [row[3] for row in pod_rows(RemoteJob(a_raw_job(workers={"replicas": 6})), pods, NOW)]
    assert states == ["waits", "runs", "done", "failed", "done", "failed"]
