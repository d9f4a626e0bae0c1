"""The families of transformers models whose layers are composed here, and how the library calls their classes."""

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from disttrain_trainer.models.transformers.expert_files import ExpertFiles


class Cut(Enum):
    """How the projections of a layer are cut over a tensor group."""

    HEADS = "each projection for itself"
    NORMED_HEADS = "as HEADS; queries and keys are normalised head by head"
    NORMED_ROWS = "as HEADS; queries and keys are normalised over all heads"
    FUSED = "projections that are one matrix are gathered, and cut behind"


@dataclass(frozen=True)
class Family:
    """A `model_type` of the library."""

    name: str
    prefix: str
    """What the names of the library's classes begin with."""
    cut: Cut
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The normalisations of a layer, over its width."""
    experts: ExpertFiles | None = None
    """How files hold the experts, if the family has any."""
    fields: tuple[str, ...] = ()
    """What the library reads of a config that does not declare it."""

    @property
    def modeling(self) -> ModuleType:
        """The library's module with the classes."""
        return import_module(f"transformers.models.{self.name}.modeling_{self.name}")

    def part(self, name: str) -> type[nn.Module]:
        """Return a class of the family: `DecoderLayer`, `Attention`, `RMSNorm` or `RotaryEmbedding`; with experts also
        `SparseMoeBlock`, `TopKRouter` or `Experts`."""
        found: Any = getattr(self.modeling, self.prefix + name)
        return found


_OLMO2_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_QWEN_EXPERTS = ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    family.name: family
    for family in (
        Family("granite", "Granite", Cut.HEADS),
        Family("llama", "Llama", Cut.HEADS),
        Family("mistral", "Mistral", Cut.HEADS),
        Family("mixtral", "Mixtral", Cut.HEADS, experts=ExpertFiles("block_sparse_moe", "w1", "w3", "w2")),
        Family("olmo2", "Olmo2", Cut.NORMED_ROWS, _OLMO2_NORMS),
        Family("phi3", "Phi3", Cut.FUSED),
        Family("qwen2", "Qwen2", Cut.HEADS),
        Family("qwen3", "Qwen3", Cut.NORMED_HEADS),
        Family("qwen3_moe", "Qwen3Moe", Cut.NORMED_HEADS, experts=_QWEN_EXPERTS, fields=("head_dim",)),
        Family("smollm3", "SmolLM3", Cut.HEADS),
    )
}
