"""Seed checkpoints: weights out of one layout, into one file, into every other."""

import pytest
import torch
from safetensors.torch import load_file

from disttrain.main import main
from disttrain_api.names import ExitCode
from tests.unit.trainer.test_checkpoint import run
from tests.unit.trainer.worlds import run_cases, small, user

SHARDED = {"dataParallelShardDegree": 2}
TENSOR = {"tensorParallelDegree": 2}
TRAINING = small(
    steps=3,
    model=user("double_gpt"),
    data=user("double_tokens"),
    optimizer={"name": "AdamW", "learningRate": 0.01},
    logging={"interval": 1},
)


def beginning_from(path, **changes):
    """A run whose own initialisation is another one than the seed's."""
    return {**TRAINING, "seed": 9, "checkpoint": {"initialFrom": str(path)}, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def seed(folder):
    """One process's checkpoint of step 3, and the file it was exported to."""
    (rank,) = run(folder / "run", TRAINING, folder)
    assert rank.code == ExitCode.DONE
    assert main(["export", str(folder / "test"), str(folder / "seed.safetensors")]) == 0
    return folder / "test" / "step-3", folder / "seed.safetensors"


@pytest.fixture(scope="module")
def alone(folder, seed):
    """What one process makes of the seed."""
    checkpoint, file = seed
    (first,) = run(folder / "first", {**TRAINING, "seed": 9}, folder / "fresh")
    assert first.code == ExitCode.DONE
    cases = {
        "file": [{"training": beginning_from(file)}],
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
def together(folder, seed):
    """What two ranks make of it, in several layouts."""
    checkpoint, file = seed
    layouts = {"dp2": {}, "fsdp2": SHARDED, "tp2": TENSOR}
    cases = {
        f"{name} from {what.name}": [{"training": beginning_from(what), "parallelism": parallelism}]
        for name, parallelism in layouts.items()
        for what in (checkpoint, file)
    }
    results = run_cases(folder / "together", 2, cases)
    assert [result["errors"] for result in results.values()] == [[None]] * len(cases)
    return results


def losses(result):
    return [line["loss_metrics/global_avg_loss"] for line in result["metrics"] if "lr" in line]


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


class TestSeed:
    @pytest.mark.parametrize("name", ["dp2", "fsdp2", "tp2"])
    @pytest.mark.parametrize("source", ["step-3", "seed.safetensors"])
    def test_every_layout_equals_one_process(self, alone, together, name, source):
        found, expected = together[f"{name} from {source}"], alone["file"]
        assert losses(found) == pytest.approx(losses(expected), rel=1e-10)
        for parameter, value in expected["parameters"].items():
            torch.testing.assert_close(found["parameters"][parameter], value, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("name", ["checkpoint", "latest"])
    def test_file_and_checkpoint_are_alike(self, alone, name):
        assert same(alone[name]["parameters"], alone["file"]["parameters"])

    def test_it_counts_and_training_begins_at_step_0(self, alone):
        assert losses(alone["file"])[0] < losses(alone["without"])[0]
        assert [line["step"] for line in alone["file"]["metrics"] if "lr" in line] == [1, 2, 3]

    def test_a_checkpoint_of_the_job_comes_first(self, alone):
        assert same(alone["resumed"]["parameters"], alone["file"]["parameters"])

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("wider", ["CheckpointMismatch", "seed.safetensors", "has shape", "initialFrom"]),
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
    @pytest.mark.parametrize("name", ["dp2", "fsdp2", "tp2"])
    def test_any_layout_becomes_the_whole_model(self, folder, together, tmp_path, name, capsys):
        case = f"{name} from step-3"
        target = tmp_path / "out.safetensors"
        assert main(["export", str(folder / "together" / case / "test" / "step-3"), str(target)]) == 0
        assert same(load_file(target), together[case]["parameters"])
        assert capsys.readouterr().out == f"{target}: {target.stat().st_size} bytes\n"

    def test_mistakes_end_with_a_sentence(self, seed, tmp_path, capsys):
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
            assert sentence in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
