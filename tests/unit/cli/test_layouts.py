"""`disttrain plan --layouts`: which layouts are looked at, and in which order they come."""

import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain.main import main
from disttrain.planning.candidates import Ranking
from disttrain.planning.cost import Link, Machine
from disttrain.planning.layouts import Layout, layouts_of, pipeline_ranks, refusal, samples_of, sparing
from disttrain.planning.ranking import rank_layouts
from disttrain.planning.trainer import Request
from disttrain_api import manifest
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism
from disttrain_api.spec import DistTrainingJob
from disttrain_api.validate import problems

EXAMPLES = Path(__file__).parents[3] / "examples"
MACHINE = Machine(1e12, Link(1e10, 1e-5))
GPT = {
    "model": {"name": "gpt", "config": {"layers": 8, "heads": 4, "width": 64, "tieWeights": False}},
    "data": {"name": "synthetic", "config": {"kind": "Tokens", "size": 64, "sequenceLength": 32}},
    "steps": 4,
    "globalBatchSize": 64,
}


def job(ranks: int, pods: int = 1, parallelism: dict[str, Any] | None = None, **training: Any) -> DistTrainingJob:
    workers = {"replicas": pods, "processesPerPod": ranks // pods}
    spec = {"workers": workers, "parallelism": parallelism or {}, "training": {**GPT, **training}}
    kind = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": {"name": "layouts"}}
    return manifest.of_object({**kind, "spec": spec})


def meshes(of: DistTrainingJob) -> set[str]:
    return {Mesh.of(one.parallelism, of.spec.world_size).describe() for one in layouts_of(of)}


def test_two_ranks_have_each_kind_of_parallelism() -> None:
    assert meshes(job(2)) == {"dp2", "fsdp2", "tp2", "pp2"}


def test_all_that_multiply_to_the_ranks_are_there() -> None:
    found = meshes(job(8))
    assert {
        "dp8",
        "dp4 x fsdp2",
        "fsdp8",
        "fsdp2 x tp4",
        "dp2 x fsdp2 x tp2",
        "pp2 x tp4",
        "pp2 x fsdp2 x tp2",
    } <= found
    # Four heads are not cut into eight.
    assert not any("tp8" in one for one in found)
    # Tensor groups stay in a pod.
    assert not any("tp4" in one for one in meshes(job(8, pods=4)))


def test_each_layout_is_a_valid_job_of_the_same_global_batch() -> None:
    original = job(8, microBatchSize=2)
    found = layouts_of(original)
    assert len(found) > 10
    for one in found:
        changed = one.applied_to(original)
        assert problems(changed) == []
        assert samples_of(changed.spec) == 64
    kinds = [Mesh.of(one.parallelism, 8).describe() for one in found]
    assert kinds.index("dp8") < kinds.index("fsdp2 x tp4") < kinds.index("pp2 x fsdp2 x tp2")


def test_what_tensor_groups_alone_do_keeps_no_other_layout_away() -> None:
    cut = {"tensorParallelDegree": 2, "sequenceParallel": True}
    plain = meshes(job(2, parallelism=cut, compile=True))
    assert meshes(job(2, parallelism=cut | {"asyncTensorParallel": True}, compile=True)) == plain
    assert {"dp2", "tp2"} <= plain


def test_context_parallelism_stays() -> None:
    assert all("cp2" in one for one in meshes(job(8, parallelism={"contextParallelDegree": 2})))


def test_what_is_not_compared_is_named() -> None:
    assert "a command of its own" in (refusal(manifest.load(EXAMPLES / "collectives.yaml").spec) or "")
    assert "mode LocalSGD trains otherwise" in (refusal(manifest.load(EXAMPLES / "local-sgd.yaml").spec) or "")
    assert refusal(job(2).spec) is None


def test_less_memory_costs_recomputation_first_and_smaller_microbatches_then() -> None:
    layout = Layout(Parallelism(), False, 4, 1)
    found = [(one.recompute, one.micro_batch_size, one.accumulation) for one in sparing(layout)]
    assert found == [(True, 4, 1), (True, 2, 2), (True, 1, 4)]


def test_first_and_last_stage_are_asked_for() -> None:
    assert pipeline_ranks(job(8, parallelism={"pipelineParallelDegree": 4})) == [0, 6]
    assert pipeline_ranks(job(8)) == [0]


def answered(requests: Sequence[Request]) -> Generator[Mapping[str, Any], None, None]:
    """A model whose memory and time follow from the layout alone."""
    for request in requests:
        spec = request.manifest.spec
        assert spec.training is not None
        mesh = Mesh.of(spec.parallelism, spec.world_size)
        if mesh.tensor > 1:
            yield {"error": "`parallelism.tensorParallelDegree`: no plan"}
            continue
        micro = spec.training.micro_batch_size or 0
        recomputes = spec.training.activation_checkpointing.value != "None"
        peak = 1000 // mesh.shard + micro * (1 if recomputes else 100)
        sent = {"operation": "all-reduce", "axis": "shard", "ranks": 2, "within_pod": True, "calls": 1}
        work = {"flops": 1e12 * (1.3 if recomputes else 1), "messages": [{**sent, "bytes": 1e10 * mesh.shard}]}
        yield {"rank": request.rank, "parameters": 1, "peak": peak, "work": work}


def ranked(of: DistTrainingJob, device_bytes: int | None, **options: Any) -> tuple[Ranking, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    settings = {"within_seconds": 100.0, "ask": answered, **options}
    found = rank_layouts(of, layouts_of(of), MACHINE, device_bytes, progress=lambda *at: seen.append(at), **settings)
    return found, seen


def test_layouts_come_by_their_time_and_what_cannot_be_built_says_why() -> None:
    found, seen = ranked(job(2), None)
    times = [one.time.total for one in found.ranked if one.time is not None]
    assert times == sorted(times)
    names = [one.layout.describe(2) for one in found.ranked]
    assert names[-1] == "fsdp2", "it sends twice as much here"
    assert ["no plan" in (one.reason or "") for one in found.left_out] == [True]
    total = len(layouts_of(job(2)))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_what_does_not_fit_spares_memory_until_it_does() -> None:
    # dp2 has 32 samples: 1000 + 3200, recomputed 1032, with a quarter of the samples 1008.
    found, _ = ranked(job(2), 1010)
    (dp,) = [one for one in found.ranked if one.layout.describe(2).startswith("dp2")]
    assert (dp.layout.recompute, dp.layout.micro_batch_size, dp.layout.accumulation) == (True, 8, 4)
    assert dp.needed == 1008
    too_small, _ = ranked(job(2), 900)
    (dp,) = [one for one in too_small.left_out if one.layout.describe(2).startswith("dp2")]
    assert dp.reason == "does not fit"
    assert dp.needed == 1002


def test_what_is_known_in_part_is_not_what_a_layout_needs() -> None:
    """Where a step is known and its memory is not."""

    def in_part(requests: Sequence[Request]) -> Generator[Mapping[str, Any], None, None]:
        for answer in answered(requests):
            yield answer | {"peak": None, "unknown": "why", "parameters": 1000} if "work" in answer else answer

    found, _ = ranked(job(2), 1010, ask=in_part)
    assert found.ranked
    assert {one.needed for one in found.ranked} == {None}
    too_small, _ = ranked(job(2), 900, ask=in_part)
    assert not too_small.ranked, "what is known is too much already"


def test_no_estimate_begins_after_the_time_is_over() -> None:
    clock = iter([0.0, 1.0, 2.0, *[11.0] * 100])
    found, _ = ranked(job(2), None, within_seconds=10.0, clock=lambda: next(clock))
    assert len(found.candidates) == 2
    assert found.unasked == len(layouts_of(job(2))) - 2


OPTIONS = ("--flops", "1T", "--bandwidth", "1G")


def test_a_ranking_is_written_as_a_manifest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "chosen.yaml"
    file = str(EXAMPLES / "ddp.yaml")
    assert main(["plan", file, "--layouts", *OPTIONS, "--most", "2", "--write", str(target), "--row", "2"]) == 0
    out, err = capfd.readouterr()
    assert "1 of 2 layouts" in err
    assert "more layouts were not estimated" in out
    assert "Whether they fit is not known" in out
    chosen = manifest.load(target)
    described = Mesh.of(chosen.spec.parallelism, 2).describe()
    (line,) = [line for line in out.splitlines() if line.startswith("2 ")]
    assert described in line
    original = manifest.load(file)
    assert chosen.metadata.name == original.metadata.name
    assert samples_of(chosen.spec) == samples_of(original.spec)
    models = [yaml.safe_load(Path(one).read_text())["spec"]["training"]["model"] for one in (target, file)]
    assert models[0] == models[1]


def test_a_ranking_as_json_has_fields_of_the_manifest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "compression.yaml"), "--layouts", *OPTIONS, "--most", "1", "-o", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (one,) = found["ranked"]
    assert one["layout"] == "dp2"
    assert one["seconds"]["step"] == pytest.approx(one["seconds"]["compute"] + one["seconds"]["sending"])
    assert one["parallelism"]["dataParallel"]["compression"]["name"] == "TopK"
    assert one["needed"] > 0
    assert found["not_estimated"] > 0


def test_what_cannot_be_ranked_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ddp = str(EXAMPLES / "ddp.yaml")
    for arguments, code, sentence in (
        ([str(EXAMPLES / "local-sgd.yaml"), "--layouts", *OPTIONS], 1, "no other layouts: mode LocalSGD"),
        ([ddp, "--layouts"], 2, "give --bandwidth 12.5G"),
        ([str(tmp_path / "none.yaml"), "--layouts", *OPTIONS], 1, "no such file"),
        ([ddp, "--layouts", *OPTIONS, "--most", "1", "--gpu-memory", "1"], 1, "no layout is left"),
        ([ddp, "--layouts", *OPTIONS, "--most", "1", "--write", str(tmp_path), "--row", "5"], 2, "--row: found 5"),
        ([ddp, "--layouts", *OPTIONS, "--most", "1", "--write", str(tmp_path)], 1, "cannot write"),
    ):
        assert main(["plan", *arguments]) == code
        assert sentence in capfd.readouterr().err


def test_an_interrupt_ends_the_trainer() -> None:
    ended = []

    def asked(requests: Sequence[Request]) -> Generator[Mapping[str, Any], None, None]:
        try:
            yield from answered(requests)
        finally:
            ended.append(len(requests))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    of = job(2)
    with pytest.raises(KeyboardInterrupt):
        rank_layouts(of, layouts_of(of), MACHINE, None, 100.0, interrupt, asked)
    assert len(ended) == 1
