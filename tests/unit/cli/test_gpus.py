"""Slices of this machine's GPUs."""

from pathlib import Path

import pytest
import yaml

from disttrain.errors import CommandError
from disttrain.local.gpus import gpu_slices
from disttrain.main import main
from disttrain_api.spec import JobSpec, Workers
from tests.builders import a_manifest


def spec(**workers: object) -> JobSpec:
    return JobSpec(workers=Workers.model_validate(workers))


def test_a_pod_that_asks_for_no_gpu_sees_none() -> None:
    assert gpu_slices(spec(replicas=2), {"CUDA_VISIBLE_DEVICES": "0,1"}) == ["", ""]


def test_each_pod_gets_its_own_of_the_devices_that_the_shell_lets_through() -> None:
    assert gpu_slices(spec(replicas=2, gpus_per_pod=2), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == ["4,5", "6,7"]
    assert gpu_slices(spec(gpus_per_pod=1), {"CUDA_VISIBLE_DEVICES": "GPU-3f9a, GPU-77"}) == ["GPU-3f9a"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "nvidia-smi"


def test_the_drivers_own_tool_counts_them(machine: Path) -> None:
    machine.write_text("#!/bin/sh\nprintf 'GPU 0: H200 (UUID: a)\\nGPU 1: H200 (UUID: b)\\n'\n")
    machine.chmod(0o755)
    assert gpu_slices(spec(replicas=2, gpus_per_pod=1), {}) == ["0", "1"]


def test_a_driver_that_does_not_answer_means_no_gpu(machine: Path) -> None:
    machine.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    machine.chmod(0o755)
    with pytest.raises(CommandError, match="this machine has 0"):
        gpu_slices(spec(gpus_per_pod=1), {})


def test_too_few_gpus_are_refused_with_what_to_do() -> None:
    with pytest.raises(CommandError) as refused:
        gpu_slices(spec(replicas=2, gpus_per_pod=4), {"CUDA_VISIBLE_DEVICES": "0"})
    assert str(refused.value) == (
        "the job asks for 8 GPUs (2 pods x 4) and this machine has 1; remove gpusPerPod (keep the ranks with "
        "processesPerPod) to train on the CPU, or send the job to a cluster with `disttrain submit`"
    )


def test_other_accelerators_are_a_clusters_business() -> None:
    with pytest.raises(CommandError, match=r"not amd\.com/gpu"):
        gpu_slices(spec(gpus_per_pod=1, gpu_resource="amd.com/gpu"), {})


def test_a_run_whose_gpus_are_not_there_does_not_begin(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(a_manifest(workers={"gpusPerPod": 4})))
    assert main(["run", "job.yaml"]) == 1
    assert "this machine has 0" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
