"""Tiny random models of transformers in float64, as a job's own code builds them."""

from typing import Any

import torch
from torch import nn

from disttrain_api.transformers_config import LoraConfig, TransformersConfig
from disttrain_trainer.models.transformers.model import build

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama, llama3 rotary": {
        "model_type": "llama",
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {},
    "qwen2, windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "mistral, window": {"model_type": "mistral", "sliding_window": 3},
    "mixtral": {"num_local_experts": 4},
    "mixtral, window": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 3},
    "qwen3_moe": {**_QWEN_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    "qwen3_moe, dense layer, windows": {
        **_QWEN_EXPERTS,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 3,
    },
    "olmo2": {},
    "phi3": {"tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "smollm3": {"no_rope_layers": [1, 0], "tie_word_embeddings": False},
}


def described(family: str) -> dict[str, Any]:
    """The config of a tiny model, as a manifest has it."""
    return {"model_type": family, **SIZES, **FAMILIES[family]}


def moved(module: nn.Module) -> nn.Module:
    """In float64, no parameter at zero or one, so that all can be compared."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return module


def double_transformers(family: str = "llama", lora: dict[str, Any] | None = None, **config: Any) -> nn.Module:
    """A tiny model, with fields of its config changed, and adapters as the manifest describes them."""
    given = TransformersConfig(config=described(family) | config, sequence_length=8, lora=_adapters(lora))
    return moved(build(given))


def double_folder(path: str, lora: dict[str, Any] | None = None) -> nn.Module:
    """The model that a folder describes, whatever weights there are in it."""
    return moved(build(TransformersConfig(path=path, sequence_length=8, lora=_adapters(lora))))


def _adapters(lora: dict[str, Any] | None) -> LoraConfig | None:
    return None if lora is None else LoraConfig.model_validate(lora, by_alias=True)
