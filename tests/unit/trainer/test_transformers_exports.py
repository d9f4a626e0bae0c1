"""Folders of every family of transformers models: `from_pretrained` computes what was trained, however it was cut."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from disttrain.main import main
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.checkpoint.export import StoredModel
from disttrain_trainer.models.transformers.families import FAMILIES as SUPPORTED
from disttrain_trainer.transformers_export import export_model
from tests.corpora import sentences, trained_tokenizer
from tests.unit.trainer.comparisons import require_same, require_same_bits
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_transformers_layouts import training
from tests.unit.trainer.transformers_code import FAMILIES, described, double_transformers
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

PROMPT = torch.arange(8).unsqueeze(0)
EXPERTS = ("mixtral", "qwen3_moe")
CUT = {
    "fsdp2": {SHARD: 2},
    "tp2": {TENSOR: 2, "vocabularyParallel": True},
    "pp2": {PIPELINE: 2},
    "fsdp2 + ep2": {SHARD: 2, "expertParallelDegree": 2},
}
# Layout and family: fused projections and tied embeddings, a head of its own, and experts.
CASES = [
    *((layout, family) for layout in ("fsdp2", "tp2", "pp2") for family in ("phi3", "smollm3")),
    ("fsdp2 + ep2", "mixtral"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process has trained, by family."""
    return run_cases(folder / "alone", 1, {family: [{"training": training(family)}] for family in FAMILIES})


@pytest.fixture(scope="module")
def exported(folder, alone):
    """The folder of each family."""
    return {family: export(folder / "alone" / family, family, folder / f"exported {family}") for family in alone}


@pytest.fixture(scope="module")
def read(folder, exported):
    """Runs that begin with a checkpoint and with the folder of it, and by themselves with other values than both."""
    begins = {
        (family, kind): training(family) | {"seed": 9, "checkpoint": {"initialFrom": str(path)}}
        for family, target in exported.items()
        for kind, path in {"checkpoint": checkpoint(folder / "alone" / family), "folder": target}.items()
    }
    cases = {f"{family} of {kind}": [{"training": begin}] for (family, kind), begin in begins.items()}
    return run_cases(folder / "read", 1, cases)


@pytest.fixture(scope="module")
def together(folder):
    cases = {
        f"{layout}, {family}": [{"training": training(family), "parallelism": CUT[layout]}] for layout, family in CASES
    }
    return run_cases(folder / "together", 2, cases)


def checkpoint(of_case):
    return of_case / "test" / "step-3"


def export(of_case, family, target):
    """The folder `target`, of what a case has trained, in several files."""
    given = TransformersConfig(config=described(family))
    export_model(StoredModel(checkpoint(of_case)), given, target, most=4000)
    return target


def require_loaded(target, family, parameters):
    """Fails where the library does not read all of a folder, and nothing else, and compute what these parameters do."""
    # torch's grouped product of experts knows no float64.
    eager = {"experts_implementation": "eager"} if family.startswith(EXPERTS) else {}
    model, found = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, **eager)
    assert not any(found.values()), found
    assert model.dtype == torch.float64
    own = double_transformers(family)
    own.load_state_dict(parameters)
    torch.testing.assert_close(model(PROMPT).logits, own.eval()(PROMPT), rtol=1e-12, atol=1e-12)


def test_all_supported_families_are_judged():
    assert {described(family)["model_type"] for family in FAMILIES} == SUPPORTED.keys()


@pytest.mark.parametrize("family", FAMILIES)
class TestFamily:
    def test_from_pretrained_computes_the_same(self, alone, exported, family):
        assert alone[family]["errors"] == [None]
        require_loaded(exported[family], family, alone[family]["parameters"])

    def test_a_tied_head_is_in_no_file_and_another_one_is(self, exported, family):
        tied = json.loads((exported[family] / "config.json").read_text())["tie_word_embeddings"]
        names = {name for file in exported[family].glob("*.safetensors") for name in load_file(file)}
        assert ("lm_head.weight" in names) is not tied

    def test_a_run_begins_with_the_same_bits(self, read, family):
        found, expected = read[f"{family} of folder"], read[f"{family} of checkpoint"]
        assert found["errors"] == expected["errors"] == [None]
        require_same_bits(found["parameters"], expected["parameters"])


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_from_pretrained_computes_the_same_of_ranks_that_had_parts(folder, alone, together, tmp_path, layout, family):
    name = f"{layout}, {family}"
    assert together[name]["errors"] == [None]
    target = export(folder / "together" / name, family, tmp_path / "exported")
    require_loaded(target, family, together[name]["parameters"])
    require_same(together[name]["parameters"], alone[family]["parameters"])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_tokenizer_of_a_folder_encodes_as_before(folder, exported, tmp_path, family):
    tokenizers = pytest.importorskip("tokenizers")
    before = tokenizers.Tokenizer.from_str(trained_tokenizer())
    before.no_truncation()
    model, target = tmp_path / "model", tmp_path / "exported"
    transformers.PreTrainedTokenizerFast(tokenizer_object=before, eos_token="<end>").save_pretrained(model)
    shutil.copy(exported[family] / "config.json", model)
    assert main(["export", str(checkpoint(folder / "alone" / family)), str(target), "--model", str(model)]) == 0
    after = transformers.AutoTokenizer.from_pretrained(target)
    texts = [sentences(number) for number in range(20)]
    assert [after.encode(text) for text in texts] == [before.encode(text).ids for text in texts]
    assert [after.decode(after.encode(text)) for text in texts] == texts
    assert after.eos_token_id == before.token_to_id("<end>")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_folder_in_another_number_format_is_what_was_trained_rounded(folder, exported, tmp_path, family):
    arguments = ["export", str(checkpoint(folder / "alone" / family)), str(tmp_path / "rounded")]
    assert main([*arguments, "--model", str(exported[family]), "--dtype", "bfloat16"]) == 0
    tensors = {
        name: tensor for file in exported[family].glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    require_same_bits(rounded, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main([*arguments, "--model", str(exported[family]), "--dtype", "int8"]) == 2
