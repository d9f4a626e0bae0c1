"""Seed checkpoints: weights out of one layout, into one file, into every other."""

import pytest
from safetensors.torch import load_file

from disttrain.main import main
from disttrain_api.names import ExitCode
from tests.unit.trainer.comparisons import require_same, require_same_bits, series
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_checkpoint import run
from tests.unit.trainer.worlds import run_cases, small, user

TRAINING = small(
    steps=3,
    model=user("double_gpt"),
    data=user("double_tokens"),
    optimizer={"name": "AdamW", "learningRate": 0.01},
    logging={"interval": 1},
)
MODELS = {"gpt": user("double_gpt"), "experts": user("double_moe_gpt")}
# ranks, model, parallelism
LAYOUTS = {
    "dp2": (2, "gpt", {}),
    "fsdp2": (2, "gpt", {SHARD: 2}),
    "tp2": (2, "gpt", {TENSOR: 2}),
    "pp2": (2, "gpt", {PIPELINE: 2}),
    "fsdp2 + ep2": (2, "experts", {SHARD: 2, "expertParallelDegree": 2}),
    "devices": (1, "gpt", {"devicesPerProcess": 2}),
    "pp2 x dp2, ZBVZeroBubble": (4, "gpt", {PIPELINE: 2, "pipeline": {"schedule": "ZBVZeroBubble"}}),
    "pp2 x tp2": (4, "gpt", {PIPELINE: 2, TENSOR: 2}),
}


def beginning_from(path, **changes):
    """A run whose own initialisation is another one than the seed's."""
    return {**TRAINING, "seed": 9, "checkpoint": {"initialFrom": str(path)}, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def seeds(folder):
    """One process's checkpoint of step 3 of each model, and the file it was exported to."""
    cases = {name: [{"training": {**TRAINING, "model": model}}] for name, model in MODELS.items()}
    assert [result["errors"] for result in run_cases(folder / "seeds", 1, cases).values()] == [[None]] * len(cases)
    found = {name: (folder / "seeds" / name / "test" / "step-3", folder / f"{name}.safetensors") for name in MODELS}
    for checkpoint, file in found.values():
        assert main(["export", str(checkpoint.parent), str(file)]) == 0
    return found


@pytest.fixture(scope="module")
def seed(seeds):
    """That of the model without experts."""
    return seeds["gpt"]


@pytest.fixture(scope="module")
def alone(folder, seeds):
    """What one process makes of the seed."""
    checkpoint, file = seeds["gpt"]
    (first,) = run(folder / "first", {**TRAINING, "seed": 9}, folder / "fresh")
    assert first.code == ExitCode.DONE
    cases = {
        "file": [{"training": beginning_from(file)}],
        "file of experts": [{"training": beginning_from(seeds["experts"][1], model=MODELS["experts"])}],
        "checkpoint": [{"training": beginning_from(checkpoint)}],
        "latest": [{"training": beginning_from(checkpoint.parent)}],
        "without": [{"training": {**TRAINING, "seed": 9}}],
        "resumed": [{"training": beginning_from(file), "stop_after": 2}, {"training": beginning_from(file)}],
        "wider": [{"training": beginning_from(file, model=user("double_gpt", width=32))}],
        "deeper": [{"training": beginning_from(checkpoint, model=user("double_gpt", layers=3))}],
        "shallower": [{"training": beginning_from(file, model=user("double_gpt", layers=1))}],
        "nothing": [{"training": beginning_from("no/such/place")}],
    }
    return run_cases(folder / "alone", 1, cases)


@pytest.fixture(scope="module")
def together(folder, seeds):
    """What several ranks make of it, in several layouts; and where their checkpoints are."""
    found = {}
    for world in sorted({ranks for ranks, *_ in LAYOUTS.values()}):
        cases = {
            f"{name} from {source}": [
                {"training": beginning_from(path, model=MODELS[model]), "parallelism": parallelism}
            ]
            for name, (ranks, model, parallelism) in LAYOUTS.items()
            if ranks == world
            for source, path in zip(("checkpoint", "file"), seeds[model], strict=True)
        }
        results = run_cases(folder / f"world-of-{world}", world, cases)
        found |= {name: {**result, "folder": folder / f"world-of-{world}" / name} for name, result in results.items()}
    assert {name: result["errors"] for name, result in found.items() if result["errors"] != [None]} == {}
    return found


class TestSeed:
    @pytest.mark.parametrize("name", LAYOUTS)
    @pytest.mark.parametrize("source", ["checkpoint", "file"])
    def test_every_layout_equals_one_process(self, alone, together, name, source):
        found = together[f"{name} from {source}"]
        expected = alone["file of experts" if LAYOUTS[name][1] == "experts" else "file"]
        assert series(found) == pytest.approx(series(expected), rel=1e-10)
        require_same(found["parameters"], expected["parameters"], 1e-10)

    @pytest.mark.parametrize("name", ["checkpoint", "latest"])
    def test_file_and_checkpoint_are_alike(self, alone, name):
        require_same_bits(alone[name]["parameters"], alone["file"]["parameters"])

    def test_it_counts_and_training_begins_at_step_0(self, alone):
        assert series(alone["file"])[0] < series(alone["without"])[0]
        assert [line["step"] for line in alone["file"]["metrics"] if "lr" in line] == [1, 2, 3]

    def test_a_checkpoint_of_the_job_comes_first(self, alone):
        require_same_bits(alone["resumed"]["parameters"], alone["file"]["parameters"])

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("wider", ["CheckpointMismatch", "gpt.safetensors", "has shape", "initialFrom"]),
            ("deeper", ["CheckpointMismatch", "step-3", "has no parameter `blocks.2."]),
            ("shallower", ["CheckpointMismatch", "`blocks.1.", "is unknown here"]),
            ("nothing", ["InvalidConfiguration", "no/such/place is neither"]),
        ],
    )
    def test_other_weights_are_refused_by_name(self, alone, name, parts):
        for part in parts:
            assert part in alone[name]["errors"][0]


class TestRelative:
    def test_a_relative_path_counts_from_the_storage(self, seed, tmp_path):
        (tmp_path / "seeds").mkdir()
        (tmp_path / "seeds" / "one.safetensors").write_bytes(seed[1].read_bytes())
        (rank,) = run(tmp_path / "run", beginning_from("seeds/one.safetensors"), tmp_path)
        assert rank.code == ExitCode.DONE
        assert f"weights from {tmp_path}/seeds/one.safetensors" in rank.out

    def test_a_damaged_seed_is_refused(self, seed, tmp_path):
        damaged = tmp_path / "step-3"
        damaged.mkdir()
        for file in seed[0].iterdir():
            (damaged / file.name).write_bytes(file.read_bytes())
        (damaged / "__0_0.distcp").write_bytes(b"")
        (rank,) = run(tmp_path / "run", beginning_from("step-3"), tmp_path)
        assert rank.code == ExitCode.CHECKPOINT_BROKEN
        assert f"{damaged}/__0_0.distcp has 0 bytes" in rank.report.error.message


class TestExport:
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_any_layout_becomes_the_whole_model(self, together, tmp_path, name, capfd):
        result = together[f"{name} from checkpoint"]
        target = tmp_path / "out.safetensors"
        assert main(["export", str(result["folder"] / "test" / "step-3"), str(target)]) == 0
        require_same_bits(load_file(target), result["parameters"])
        assert capfd.readouterr().out == f"{target}: {target.stat().st_size} bytes\n"

    def test_mistakes_end_with_a_sentence(self, seed, tmp_path, capfd):
        checkpoint, file = seed
        damaged = tmp_path / "step-3"
        damaged.mkdir()
        for one in checkpoint.iterdir():
            (damaged / one.name).write_bytes(one.read_bytes())
        (damaged / "__0_0.distcp").write_bytes(b"")
        out = tmp_path / "out.safetensors"
        for arguments, code, sentence in (
            ([tmp_path / "none", out], 1, f"{tmp_path}/none is neither"),
            ([checkpoint, tmp_path / "out.pt"], 2, "must end with .safetensors"),
            ([file, out], 2, "is a .safetensors file already"),
            ([damaged, out], 1, f"{damaged}/__0_0.distcp has 0 bytes, expected"),
            ([checkpoint, tmp_path / "no" / "out.safetensors"], 1, "No such file or directory"),
        ):
            assert main(["export", *map(str, arguments)]) == code
            assert sentence in capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
