"""On one GPU: normalisation over replicas, models that are built without memory, and the checks of a network."""

import pytest
import torch

from disttrain_api.collectives import Operation
from disttrain_trainer.checks.collectives.results import from_json
from tests.gpu.worlds import DEVICE, EVERYTHING, beside_each_other, ended, run_on_gpu, worlds_of
from tests.unit.trainer import test_meta_device as meta
from tests.unit.trainer import test_sync_batch_norm as norm
from tests.unit.trainer.collectives_rank import PLAN
from tests.unit.trainer.worlds import launch, small

LOSS = "loss_metrics/global_avg_loss"


def two_ranks(layouts):
    return {name: layout for name, layout in layouts.items() if layout[0] == 2}


NORMALISED = {name: layout for name, layout in two_ranks(norm.LAYOUTS).items() if layout[2]}
MODELS = ("dp2", "fsdp2, offloaded, recomputed", "tp2, vocabulary", "pp2", "experts over fsdp2")
BUILT = {name: layout for name, layout in two_ranks(meta.LAYOUTS).items() if EVERYTHING or name in MODELS}


@worlds_of("norm")
def start_normalised(folder):
    alone = {"plain": [{"training": norm.PLAIN}], "accumulated": [{"training": norm.ACCUMULATED}]}
    cases = {
        name: [{"training": training, "parallelism": parallelism}]
        for name, (_, training, parallelism) in NORMALISED.items()
    }
    return beside_each_other(
        lambda: run_on_gpu(folder / "alone", 1, alone), lambda: run_on_gpu(folder / "together", 2, cases)
    )


@pytest.mark.gpu_path("batch normalisation over replicas")
@pytest.mark.gpu_world("norm")
@pytest.mark.parametrize("layout", NORMALISED)
def test_replicas_normalise_as_one_process(world, layout):
    alone, together = world
    require_equal(alone["accumulated" if "accumulated" in layout else "plain"], together[layout])


@worlds_of("meta")
def start_built(folder):
    alone = {training: [{"training": meta.TRAININGS[training]}] for _, training, _, _ in BUILT.values()}
    cases = {
        name: [{"training": {**meta.TRAININGS[training], **changes}, "parallelism": parallelism}]
        for name, (_, training, parallelism, changes) in BUILT.items()
    }
    return beside_each_other(
        lambda: run_on_gpu(folder / "alone", 1, alone), lambda: run_on_gpu(folder / "together", 2, cases)
    )


@pytest.mark.gpu_path("models built without memory")
@pytest.mark.gpu_world("meta")
@pytest.mark.parametrize("layout", BUILT)
def test_a_model_built_without_memory_starts_alike_in_every_layout(world, layout):
    alone, together = world
    require_equal(alone[meta.LAYOUTS[layout][1]], together[layout])


@worlds_of("collectives")
def start_collectives(folder):
    """How the ranks ended, and the rows that they have measured."""
    results, module = folder / "results.json", "tests.unit.trainer.collectives_rank"
    with launch(folder, None, 4, module=module, device=DEVICE, RESULTS=str(results)) as world:
        ranks = ended(world)
    return ranks, from_json(results.read_text()) if results.exists() else []


@pytest.mark.gpu_path("checks of the network")
@pytest.mark.gpu_world("collectives")
def test_collectives_of_tensors_on_a_gpu_are_right(world):
    ranks, rows = world
    assert [rank.code for rank in ranks] == [0] * 4, "\n".join(rank.err for rank in ranks)
    assert len(rows) == len(PLAN.groups) * len(PLAN.sizes) * len(Operation)
    assert [row for row in rows if row.wrong] == []


@worlds_of("preflight")
def start_checked(folder):
    return run_on_gpu(folder, 2, {"checked": [{"training": small(preflight=True)}]})


@pytest.mark.gpu_path("checks of the network")
@pytest.mark.gpu_world("preflight")
def test_the_check_before_training_passes(world):
    assert world["checked"]["errors"] == [None]


def require_equal(expected, found):
    assert found["errors"] == [None]
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        assert torch.allclose(found["parameters"][name], value, rtol=1e-10, atol=1e-12), name
    losses = [[line[LOSS] for line in one["metrics"] if LOSS in line] for one in (expected, found)]
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
