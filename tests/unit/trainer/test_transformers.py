"""Models of transformers, composed of the library's layers, compute what the library's own do."""

from typing import Any

import pytest
import torch

from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.models.transformers.config import library_config
from disttrain_trainer.models.transformers.families import FAMILIES as SUPPORTED
from disttrain_trainer.models.transformers.heads import Heads
from disttrain_trainer.models.transformers.model import build
from disttrain_trainer.parallel.meta import materialise
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.transformers_code import FAMILIES, described, double_transformers

transformers = pytest.importorskip("transformers")


def library_model(family, **changes):
    config = library_config(TransformersConfig(config=described(family) | changes))
    # torch's grouped product knows no float64.
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).double()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_librarys(family):
    torch.manual_seed(0)
    own, theirs = double_transformers(family), library_model(family)
    assert own.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(own.state_dict())
    tokens = torch.randint(16, (3, 8))
    found, expected = own(tokens), theirs(tokens).logits
    assert torch.equal(found, expected)
    weights = torch.randn_like(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in own.named_parameters():
        assert torch.linalg.vector_norm(gradients[name]) > 0
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12)


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "changes", "parts"),
        [
            ("llama", {"model_type": "gemma2"}, ["model_type must be one of granite, llama,", "`gemma2`"]),
            ("llama", {"hiden_size": 32}, ["`hiden_size` is no field of a llama", "hidden_size"]),
            ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type `dynamic`", "length"]),
            ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["differ by layer"]),
            ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, ["`chunked_attention`", "layer_types"]),
            ("llama", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
            ("llama", {"hidden_act": "no_such"}, ["no llama can be built so", "no_such"]),
            ("llama", {"num_attention_heads": 0}, ["training.model.config"]),
            ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise 0.1", "set it to 0"]),
            ("mixtral", {"num_experts_per_tok": 5}, ["num_experts_per_tok 5 must be less than or equal", "which is 4"]),
            ("mixtral", {"num_local_experts": 10**9}, ["num_local_experts must be a whole number from 1 to 10000"]),
            ("mixtral", {"shared_expert_intermediate_size": 8}, ["`shared_expert_intermediate_size` is no field of a"]),
            (
                "qwen3_moe",
                {"num_experts_per_tok": 5},
                ["num_experts_per_tok 5 must be less than or equal", "which is 4"],
            ),
            ("qwen3_moe", {"decoder_sparse_step": 0}, ["no qwen3_moe can be built so"]),
            ("llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers must be a whole number from 1 to 1000"]),
            ("llama", {"hidden_size": "wide"}, ["training.model.config"]),
        ],
    )
    def test_what_we_would_compute_otherwise_is_refused_by_name(self, family, changes, parts):
        with pytest.raises(InvalidConfiguration) as refused:
            double_transformers(family, **changes)
        assert all(part in str(refused.value) for part in parts), refused.value

    @pytest.mark.parametrize(
        ("content", "part"),
        [
            (None, "No such file"),
            (b"{", "is no JSON"),
            (b"[]", "no JSON object"),
            (b"{}", "found none"),
            (b'{"model_type": ' + b"[" * 5000, "is no JSON"),
            (b" " * 2_000_000, "more than 1000000 bytes"),
            (b'{"model_type": "llama", "num_hidden_layers": "two"}', "training.model.config"),
        ],
    )
    def test_a_config_file_that_is_none_ends_with_a_sentence(self, tmp_path, content, part):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(InvalidConfiguration, match=part):
            build(TransformersConfig(path=str(tmp_path), sequence_length=8))

    def test_ranks_that_would_get_parts_of_heads_are_refused(self):
        heads = Heads("num_key_value_heads", 2)
        heads.require_whole(2)
        with pytest.raises(InvalidConfiguration, match=r"num_key_value_heads 2 .* multiple of 4"):
            heads.require_whole(4)

    @pytest.mark.parametrize(
        ("family", "target", "others"),
        [
            ("phi3", "q_proj", "o_proj, qkv_proj"),
            ("mixtral", "gate_up_proj", "q_proj, k_proj, v_proj, o_proj$"),
            # Only some of the layers have it.
            ("qwen3_moe, dense layer, windows", "gate_proj", "q_proj, k_proj, v_proj, o_proj$"),
        ],
    )
    def test_adapters_for_what_a_layer_has_not_are_refused(self, family, target, others):
        with pytest.raises(InvalidConfiguration, match=f"no `{target}`, expected some of {others}"):
            double_transformers(family, lora={"targets": [target]})


@pytest.mark.parametrize(
    ("family", "part", "name"),
    [
        ("llama", "DecoderLayer", "gain"),
        ("qwen3", "Attention", "self_attn.gain"),
        ("phi3", "MLP", "mlp.gain"),
        ("mixtral", "Experts", "mlp.experts.gain"),
        ("qwen3_moe", "SparseMoeBlock", "mlp.gain"),
    ],
)
def test_a_layer_with_a_parameter_that_tables_do_not_have_is_refused(family, part, name, monkeypatch):
    """Red where a later version of the library would be cut, or its experts computed, without it."""
    library: Any = SUPPORTED[family].part(part)

    class Later(library):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.gain = torch.nn.Parameter(torch.ones(1))

    monkeypatch.setattr(SUPPORTED[family].modeling, library.__name__, Later)
    with pytest.raises(
        InvalidConfiguration, match=rf"layer of {family} has the parameter `{name}` in transformers 5\."
    ):
        double_transformers(family)


@pytest.mark.parametrize("family", sorted(SUPPORTED))
@pytest.mark.parametrize(("style", "name"), [("shuffled", "self_attn.o_proj"), ("colwise", "self_attn.gain")])
def test_a_layer_that_the_library_cuts_in_another_way_is_not_cut(family, style, name):
    """Red where a later version, which computes another thing between its projections, would be cut as the earlier."""
    module = double_transformers(family)
    assert module.tensor_plan()
    module.config.base_model_tp_plan = module.config.base_model_tp_plan | {f"layers.*.{name}": style}
    with pytest.raises(
        InvalidConfiguration, match=rf"cuts `{name}` of {family} as '{style}', which disttrain does not"
    ):
        module.tensor_plan()


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe, dense layer, windows"])
def test_a_layer_that_is_initialised_gets_the_same_values_without_memory(family):
    """So that a model that is built on the meta device is no other one."""
    with torch.device("meta"):
        module = build(TransformersConfig(config=described(family), sequence_length=8))
    materialise(module, torch.device("cpu"), seed=0)
    torch.manual_seed(0)
    usual = build(TransformersConfig(config=described(family), sequence_length=8))
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert torch.equal(module.get_buffer(rotary), usual.get_buffer(rotary))
    for name, parameter in usual.named_parameters():
        assert module.get_parameter(name).std().item() == pytest.approx(parameter.std().item(), rel=0.5), name
