"""The GPUs of this machine, cut into one slice per pod. Asks the driver's own tool, never torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from disttrain.errors import CommandError
from disttrain_api.names import DEFAULT_GPU_RESOURCE
from disttrain_api.spec import JobSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_slices(spec: JobSpec, environment: Mapping[str, str] = os.environ) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker pod: nothing where it asks for no GPU, as on a cluster.

    Raises CommandError where the machine has fewer GPUs than the job asks for.
    """
    each, pods = spec.workers.gpus_per_pod, spec.workers.replicas
    if not each:
        return [""] * pods
    if spec.workers.gpu_resource != DEFAULT_GPU_RESOURCE:
        raise CommandError(
            f"disttrain run assigns NVIDIA GPUs only, not {spec.workers.gpu_resource}; "
            "send the job to a cluster with `disttrain submit`"
        )
    devices = _devices(environment)
    if len(devices) < each * pods:
        raise CommandError(
            f"the job asks for {each * pods} GPUs ({pods} pods x {each}) and this machine has {len(devices)}; "
            "remove gpusPerPod (keep the ranks with processesPerPod) to train on the CPU, "
            "or send the job to a cluster with `disttrain submit`"
        )
    return [",".join(devices[index * each : (index + 1) * each]) for index in range(pods)]


def _devices(environment: Mapping[str, str]) -> list[str]:
    """Names of the devices that may be used: those that the user's shell lets through, else all."""
    if environment.get(VISIBLE) is not None:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))] if answer.returncode == 0 else []
