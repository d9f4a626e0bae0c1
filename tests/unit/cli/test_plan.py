"""`disttrain plan`."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain.main import main
from disttrain.planning.objects import planned_objects
from disttrain.planning.rank import RankMemory, misfit
from disttrain_api import manifest

EXAMPLES = Path(__file__).parents[3] / "examples"


def planned(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "-o", "json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def changed(tmp_path: Path, example: str, **spec: Any) -> str:
    job = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    job["spec"] |= spec
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return str(file)


def test_a_plan_has_objects_mesh_and_what_a_rank_needs(capfd: pytest.CaptureFixture[str]) -> None:
    found = planned(capfd, str(EXAMPLES / "fsdp.yaml"), "--rank", "1", "--flops", "1T", "--bandwidth", "1G")
    assert [one["kind"] for one in found["objects"]] == ["Pod", "Service", "Secret"]
    assert (found["ranks"], found["mesh"]["shard"], found["memory"]["rank"]) == (2, 2, 1)
    memory = found["memory"]
    assert memory["unknown"] is None
    assert memory["peak"] > memory["parameters"] + memory["gradients"] + memory["optimizer_state"] > 0
    step = found["step"]
    sent = {one["operation"]: one for one in step["sent"]}
    # Two ranks have the whole gradient, and each of the step's two microbatches is reduced.
    assert sent["reduce-scatter"]["bytes"] == pytest.approx(2 * 2 * memory["gradients"], rel=0.01)
    assert sent["all-gather"]["axis"] == "shard"
    assert sent["all-gather"]["wire_bytes"] > sent["reduce-scatter"]["wire_bytes"]
    seconds = step["seconds"]
    assert seconds["compute"] == pytest.approx(step["flops"] / 1e12)
    assert seconds["step"] == pytest.approx(seconds["compute"] + sum(seconds["sending"]))


def test_the_objects_are_those_of_the_operator(tmp_path: Path) -> None:
    storage = {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "5Gi"}}}}}
    workers = {"replicas": 2, "envFrom": [{"secretRef": {"name": "mine"}}]}
    job = manifest.load(changed(tmp_path, "parameter-server", storage=storage, workers=workers))
    found = [(one.kind, one.count, one.name) for one in planned_objects(job)]
    assert found == [
        ("Pod", 2, "parameter-server-<uid>-worker-<index>-a1"),
        ("Pod", 2, "parameter-server-<uid>-ps-<index>-a1"),
        ("Service", 1, "parameter-server-<uid>"),
        ("Secret", 1, "parameter-server-<uid>-<digest>"),
        ("Secret", 1, "parameter-server-<uid>-<digest>-env"),
        ("PersistentVolumeClaim", 1, "parameter-server-<uid>-checkpoints"),
    ]
    assert "5Gi, ReadWriteMany" in [one.what for one in planned_objects(job)]


def test_where_nothing_can_be_built_the_least_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    memory = planned(capfd, str(EXAMPLES / "pipedream.yaml"))["memory"]
    assert "PipeDream" in memory["unknown"]
    assert memory["least"] > 0
    assert main(["plan", str(EXAMPLES / "collectives.yaml")]) == 0
    assert "Memory is not known: the job has a command of its own" in capfd.readouterr().out


def test_a_worker_of_servers_has_what_it_pushes_and_pulls(capfd: pytest.CaptureFixture[str]) -> None:
    example = str(EXAMPLES / "parameter-server.yaml")
    found = planned(capfd, example, "--flops", "1T", "--bandwidth", "1G", "--latency", "0")
    memory, step = found["memory"], found["step"]
    assert (memory["unknown"], memory["optimizer_state"]) == (None, 0)
    size = memory["parameters"]
    assert memory["peak"] > 2 * size
    assert step["servers"] == {"workers": 2, "servers": 2, "pushed": size, "pulled": size}
    assert step["seconds"]["servers"] == pytest.approx(2 * size / 1e9)
    assert main(["plan", example]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^push +servers +2 +1 ", out, re.MULTILINE)
    assert main(["plan", example, "--flops", "1T"]) == 2
    assert "needs what the network does" in capfd.readouterr().err


def test_a_page_has_sizes_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "ddp.yaml")]) == 0
    out = capfd.readouterr().out
    assert "peak of a step" in out
    assert "of rank 0 of 2:" in out
    assert "come on top" in out
    assert re.search(r"^all-reduce +replicate +2 +1 ", out, re.MULTILINE)
    assert "TIME OF A STEP" not in out, "nothing is known of the network"


MEMORY = RankMemory(0, parameters=4, buffers=0, gradients=4, optimizer_state=8, activations=10, peak=22, building=8)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (MEMORY, None),
        (replace(MEMORY, peak=25), "rank 0 needs 25 B, and a GPU has 24 B: cut the model over more ranks"),
        (replace(MEMORY, peak=25, in_host=1), None),
        (replace(MEMORY, peak=30, in_host=5), "rank 0 needs 25 B, and a GPU has 24 B"),
        (replace(MEMORY, building=32), "needs 32 B, and a GPU has 24 B: it holds the whole model before it is cut"),
        (replace(MEMORY, peak=None, optimizer_state=17, unknown="why"), "needs at least 25 B"),
        (replace(MEMORY, peak=None, unknown="why"), None),
        (RankMemory(0, least=25, unknown="why"), "needs at least 25 B"),
        (RankMemory(0, unknown="why"), None),
    ],
)
def test_what_does_not_fit_is_reported(memory: RankMemory, message: str | None) -> None:
    found = misfit(memory, 24, manifest.load(EXAMPLES / "ddp.yaml").spec)
    assert (found is None) == (message is None)
    assert (message or "") in (found or "")
    # With `offload.parameters` it is the host's memory.
    assert misfit(memory, 0, manifest.load(EXAMPLES / "offload.yaml").spec) is None


def test_what_does_not_fit_a_gpu_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "fsdp.yaml"), "--gpu-memory", "1Mi"]) == 1
    assert "disttrain: rank 0 needs " in capfd.readouterr().err
    assert main(["plan", str(EXAMPLES / "fsdp.yaml"), "--gpu-memory", "80Gi"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("size", ["much", "0", "-1Gi"])
def test_a_size_that_is_none_is_refused(size: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "fsdp.yaml"), "--gpu-memory", size]) == 2
    assert f"--gpu-memory: found '{size}', expected" in capfd.readouterr().err


def test_what_cannot_be_planned_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "ddp.yaml"), "--rank", "2"]) == 2
    assert "--rank: found 2, expected 0 to 1: the job has 2 ranks" in capfd.readouterr().err
    assert main(["plan", changed(tmp_path, "ddp", workers={"replicas": 0})]) == 1
    assert "replicas" in capfd.readouterr().err
    assert main(["plan", changed(tmp_path, "tensor-parallel", workers={"replicas": 3})]) == 1
    training = yaml.safe_load((EXAMPLES / "ddp.yaml").read_text())["spec"]["training"]
    lost = changed(tmp_path, "ddp", training={**training, "model": {"entrypoint": "nowhere:nothing"}})
    capfd.readouterr()
    assert main(["plan", lost]) == 1
    assert "rank 0 could not be built: `training.model.entrypoint`" in capfd.readouterr().err
