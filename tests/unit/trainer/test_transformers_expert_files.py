"""Weights of transformers models with experts out and in: published files, and adapters of attention."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from disttrain.main import main
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.checkpoint.export import StoredModel
from disttrain_trainer.checkpoint.safetensors_reader import SafetensorsReader
from disttrain_trainer.models.transformers.families import FAMILIES
from disttrain_trainer.models.transformers.model import build
from disttrain_trainer.runtime.errors import CheckpointBroken
from disttrain_trainer.transformers_export import export_model
from tests.builders import a_manifest
from tests.unit.trainer.comparisons import require_same, require_same_bits
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_transformers import library_model
from tests.unit.trainer.test_transformers_layouts import training
from tests.unit.trainer.transformers_code import described, double_transformers
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "o_proj"]}
PROMPT = torch.arange(8).unsqueeze(0)
# torch's grouped product knows no float64.
EAGER = {"experts_implementation": "eager"}
# Names that files have, by family.
TRAINED = {
    "mixtral": ["block_sparse_moe.gate.weight", "block_sparse_moe.experts.3.w2.weight"],
    "qwen3_moe, dense layer, windows": ["mlp.gate.weight", "mlp.experts.3.down_proj.weight"],
}
LAYOUTS = {"fsdp2 + ep2": {SHARD: 2, "expertParallelDegree": 2}, "pp2": {PIPELINE: 2}, "tp2": {TENSOR: 2}}


def beginning_from(family, path):
    """A run whose own initialisation is another one than the seed's."""
    return training(family) | {"seed": 9, "checkpoint": {"initialFrom": str(path)}}


def tensors_in(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("expert-files")


@pytest.fixture(scope="module")
def trained(folder):
    """Parameters that one process has trained, and where its checkpoint is, by family."""
    cases = {family: [{"training": training(family)}] for family in TRAINED}
    cases["lora"] = [{"training": training("mixtral", lora=LORA)}]
    found = run_cases(folder / "trained", 1, cases)
    return {
        name: (result["parameters"], folder / "trained" / name / "test" / "step-3") for name, result in found.items()
    }


@pytest.fixture(scope="module")
def exported(folder, trained):
    """The folder of each family, with several files."""
    folders = {family: folder / f"exported {family}" for family in TRAINED}
    for family, target in folders.items():
        export_model(StoredModel(trained[family][1]), TransformersConfig(config=described(family)), target, most=4000)
    return folders


@pytest.fixture(scope="module")
def read(folder, trained, exported):
    """Runs of one process that begin with the same weights: a checkpoint's, files of each kind."""
    cases = {}
    for family in TRAINED:
        stacked = folder / f"{family}.safetensors"
        save_file(trained[family][0], stacked)
        begins = {"checkpoint": trained[family][1], "files": exported[family], "stacked files": stacked}
        cases |= {f"{family}, {kind}": [{"training": beginning_from(family, at)}] for kind, at in begins.items()}
    return run_cases(folder / "read", 1, cases)


@pytest.fixture(scope="module")
def together(folder, exported, asked_for):
    cases = {
        f"{family}, {layout}": [{"training": beginning_from(family, exported[family]), "parallelism": LAYOUTS[layout]}]
        for family in TRAINED
        for layout in asked_for("test_transformers_expert_files", "layout", family=family)
    }
    return run_cases(folder / "together", 2, cases)


@pytest.mark.parametrize("family", TRAINED)
class TestExport:
    def test_from_pretrained_computes_the_same(self, trained, exported, family):
        assert len(list(exported[family].iterdir())) > 4
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            exported[family], output_loading_info=True, **EAGER
        )
        assert not any(loading_info.values()), loading_info
        own = double_transformers(family)
        own.load_state_dict(trained[family][0])
        assert model.dtype == torch.float64
        assert torch.equal(model(PROMPT).logits, own.eval()(PROMPT))

    def test_its_config_describes_the_same_model(self, trained, exported, family):
        again = build(TransformersConfig(path=str(exported[family]), sequence_length=8)).double()
        own = double_transformers(family)
        for module in (own, again):
            module.load_state_dict(trained[family][0])
        assert torch.equal(again.eval()(PROMPT), own.eval()(PROMPT))

    def test_files_are_those_that_the_library_writes(self, trained, exported, tmp_path, family):
        theirs = library_model(family)
        theirs.load_state_dict(trained[family][0])
        theirs.save_pretrained(tmp_path)
        found = tensors_in(exported[family])
        assert {f"model.layers.1.{name}" for name in TRAINED[family]} < found.keys()
        require_same_bits(found, tensors_in(tmp_path))


@pytest.mark.parametrize("family", TRAINED)
class TestImport:
    @pytest.mark.parametrize("kind", ["files", "stacked files"])
    def test_files_are_the_checkpoint_bit_by_bit(self, read, family, kind):
        found, expected = read[f"{family}, {kind}"], read[f"{family}, checkpoint"]
        assert found["errors"] == expected["errors"] == [None]
        require_same_bits(found["parameters"], expected["parameters"])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_layout_reads_them(self, together, read, family, layout):
        found = together[f"{family}, {layout}"]
        assert found["errors"] == [None]
        require_same(found["parameters"], read[f"{family}, files"]["parameters"])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"w1 of 1": None}, "it holds 3 of the 4 parts of `model.layers.0.mlp.experts.gate_up_proj`"),
        ({"w3 of 1": None, "w1 of 1": None, "w1 of 7": (2, 3)}, "it holds 3 of the 8 parts of"),
        (
            {"w3 of 1": (3, 2)},
            "`model.layers.0.block_sparse_moe.experts.1.w3.weight` is torch.float32 of shape [3, 2]",
        ),
        ({"w3 of 1": (2,)}, "of shape [2] beside"),
        ({"stack": (2, 4, 3)}, "is of `model.layers.0.mlp.experts.gate_up_proj`, which is there already"),
    ],
)
def test_experts_that_do_not_fit_together_end_with_a_sentence(tmp_path, changes, part):
    shapes = {"w1 of 0": (2, 3), "w3 of 0": (2, 3), "w1 of 1": (2, 3), "w3 of 1": (2, 3)} | changes
    names = {"stack": "model.layers.0.mlp.experts.gate_up_proj"} | {
        key: f"model.layers.0.block_sparse_moe.experts.{key[-1]}.{key[:2]}.weight" for key in shapes if key != "stack"
    }
    file = tmp_path / "model.safetensors"
    save_file({names[key]: torch.ones(shape) for key, shape in shapes.items() if shape is not None}, file)
    with pytest.raises(CheckpointBroken) as broken:
        SafetensorsReader(file, FAMILIES["mixtral"].experts.part).read_metadata()
    assert part in str(broken.value)


def test_peft_reads_adapters_of_attention(trained, tmp_path):
    peft = pytest.importorskip("peft")
    parameters, checkpoint = trained["lora"]
    model = {"name": "transformers", "config": {"config": described("mixtral"), "lora": LORA}}
    data = {"name": "synthetic", "config": {"kind": "Tokens", "vocabularySize": 16}}
    (tmp_path / "job.yaml").write_text(json.dumps(a_manifest(training={"model": model, "data": data})))
    at = ["export", str(checkpoint)]
    given = ["--model", str(tmp_path / "job.yaml")]
    assert main([*at, str(tmp_path / "adapter"), *given, "--adapter"]) == 0
    assert main([*at, str(tmp_path / "merged"), *given]) == 0
    own = double_transformers("mixtral", lora=LORA)
    own.load_state_dict(parameters)
    expected = own.eval()(PROMPT)
    base = library_model("mixtral")
    base.load_state_dict({name: value for name, value in parameters.items() if ".lora_" not in name})
    unadapted = base(PROMPT).logits
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", torch_device="cpu").double().eval()
    torch.testing.assert_close(adapted(PROMPT).logits, expected, rtol=1e-12, atol=1e-12)
    assert (expected - unadapted).abs().max() > 1e-3
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **EAGER)
    torch.testing.assert_close(merged(PROMPT).logits, expected, rtol=1e-12, atol=1e-12)
