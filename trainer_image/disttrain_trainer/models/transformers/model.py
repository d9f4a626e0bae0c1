"""A causal language model of Hugging Face's transformers, composed of the library's own layers.

The library's models are not patched: embeddings, decoder layers, normalisation and head are the library's, under the
library's names, and each layer passes one tensor to the next, as stages of a pipeline and units of FSDP2 need it.
Shapes: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from disttrain_api.transformers_config import LoraConfig, TransformersConfig
from disttrain_trainer.checkpoint.file_part import FilePart
from disttrain_trainer.models.transformers.adapter_files import base_of_adapter, part_in_adapter
from disttrain_trainer.models.transformers.attention import attend_in_parts, causal_attention
from disttrain_trainer.models.transformers.config import library_config, windows_of
from disttrain_trainer.models.transformers.experts import SparseBlock, compute_by_experts, initialise_experts
from disttrain_trainer.models.transformers.families import FAMILIES, Family
from disttrain_trainer.models.transformers.lora import Down, Up, add_adapters, is_adapter
from disttrain_trainer.models.transformers.tensor_plan import require_known, tensor_plan
from disttrain_trainer.protocols import ContextPart
from disttrain_trainer.runtime.errors import InvalidConfiguration, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Scale(nn.Module):
    """Multiplies, or divides: of any shape."""

    def __init__(self, factor: float = 1.0, divisor: float = 1.0) -> None:
        super().__init__()
        self.factor, self.divisor = factor, divisor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if self.factor != 1.0 else x / self.divisor


class Decoder(nn.Module):
    """The parts below the head; the model computes, in the order of its `layers()`."""

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__()
        # The row of the padding token is trained as any other: cut over ranks, torch would leave out another row.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _decoder_layer(family, config, number, window) for number, window in enumerate(windows_of(config))
        )
        self.norm = family.part("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)


class CausalLanguageModel(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]."""

    def __init__(
        self, config: PreTrainedConfig, sequence_length: int, lora: LoraConfig | None = None, path: str | None = None
    ) -> None:
        """path: of the folder where the config is."""
        super().__init__()
        self.config, self.sequence_length, self.lora, self.path = config, sequence_length, lora, path
        self.family = FAMILIES[config.model_type]
        self.model = Decoder(self.family, config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Granite's, of which other families have none.
        self.scale_embeddings = _scale(factor=getattr(config, "embedding_multiplier", 1.0))
        self.scale_logits = _scale(divisor=getattr(config, "logits_scaling", 1.0))
        if lora is not None:
            add_adapters(self, self.model.layers, lora)
        for layer in self.modules():
            self.initialise_layer(layer)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise_layer(self, layer: nn.Module) -> None:
        """Give values to what the layer holds itself, as the library does, from torch's random state."""
        from transformers import PreTrainedModel

        if isinstance(layer, Down | Up):
            layer.reset_parameters()
            return
        initialise_experts(self.family, self.config, layer)
        PreTrainedModel._init_weights(SimpleNamespace(config=self.config), layer)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x

    def layers(self) -> list[nn.Module]:
        """The modules whose composition this is."""
        parts = (self.model.embed_tokens, self.scale_embeddings, *self.model.layers, self.model.norm)
        return [part for part in (*parts, *self.output_layers()) if part is not None]

    def output_layers(self) -> list[nn.Module]:
        """The layers from the last hidden states to the logits."""
        return [part for part in (self.lm_head, self.scale_logits) if part is not None]

    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        """How the layers are cut over a tensor group (parallel/tensor.py)."""
        if self.lora is not None and self.lora.dropout:
            raise ValueError("`training.model.config.lora.dropout` conflicts with it: remove one of the two")
        adapted = () if self.lora is None else self.lora.targets
        sparse = [number for number, layer in enumerate(self.model.layers) if isinstance(layer.mlp, SparseBlock)]
        return tensor_plan(
            self.family, self.config, sequence=sequence, vocabulary=vocabulary, adapted=adapted, sparse=sparse
        )

    def use_context(self, context: ContextPart) -> None:
        """Compute parts of sequences from now on (parallel/context)."""
        for layer in self.model.layers:
            layer.self_attn.context = context  # type: ignore[union-attr, assignment]
        attend_in_parts(self.config)

    def vocabulary_size(self) -> int:
        """Return the number of tokens that the table of embeddings has rows for."""
        return int(self.config.vocab_size)

    def notes_for_log(self) -> list[str]:
        """Return what the log says once the model is built."""
        declared = getattr(self.config, "max_position_embeddings", self.sequence_length)
        if self.sequence_length <= declared:
            return []
        longer = f"longer than max_position_embeddings of the model's config, which is {declared}"
        advice = "rotary positions go on, which weights to begin with have not learned"
        return [f"sequences of {self.sequence_length} tokens are {longer}: {advice}"]

    def end_tokens(self) -> list[int]:
        """Return the tokens after which the library's `generate` ends a text."""
        found = getattr(self.config, "eos_token_id", None)
        return [] if found is None else list(found) if isinstance(found, list | tuple) else [int(found)]

    def begins_without(self, name: str) -> bool:
        """Whether weights to begin with may lack this parameter: it then keeps its initial values."""
        return is_adapter(name)

    def part_in_files(self, name: str) -> FilePart | None:
        """Return what a tensor of the files that the library writes or has written is in this model; None: nothing."""
        # Earlier versions saved this buffer, in each layer. The library computes it from the config, too.
        if name.endswith("rotary_emb.inv_freq"):
            return None
        files = self.family.experts
        return FilePart(name) if files is None else files.part(name)

    def base_of_adapter(self, folder: Path) -> str:
        """Return the folder of what an adapter adapts. Raises InvalidConfiguration if it is not continued here."""
        return base_of_adapter(folder, self.lora, self.path)

    def part_in_adapter(self, name: str) -> FilePart:
        """Return what a tensor of an adapter's file is in this model."""
        return part_in_adapter(name)

    def flops_per_token(self) -> float:
        """6 N + 12 L H Q T (PaLM, appendix B): forward and backward, of the longest sequences.

        A frozen parameter counts 4: it has no gradient of its own. Experts that do not compute a token do not count.
        """
        config, table = self.config, self.model.embed_tokens.weight
        tied = self.lm_head.weight is table
        used = [parameter for parameter in self.parameters() if tied or parameter is not table]
        multiplied = sum(parameter.numel() * (6 if parameter.requires_grad else 4) for parameter in used)
        idle = sum(block.idle_parameters for block in self.modules() if isinstance(block, SparseBlock))
        multiplied -= idle * (6 if self.lora is None else 4)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attended = config.num_hidden_layers * config.num_attention_heads * width * self.sequence_length
        return float(multiplied + 12 * attended)


def build(config: TransformersConfig) -> nn.Module:
    """The model that the config describes, initialised from torch's random state. Raises InvalidConfiguration."""
    described = library_config(config)
    assert config.sequence_length is not None
    try:
        return CausalLanguageModel(described, config.sequence_length, config.lora, config.path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidConfiguration(
            f"`training.model.config`: no {described.model_type} can be built so: {one_line(error)}"
        ) from error


def _decoder_layer(family: Family, config: PreTrainedConfig, number: int, window: int | None) -> nn.Module:
    layer = family.part("DecoderLayer")(config, number)
    layer.self_attn = causal_attention(family, config, number, window)
    require_known(family, config, layer)
    compute_by_experts(layer, family, config)
    return layer


def _scale(factor: float = 1.0, divisor: float = 1.0) -> Scale | None:
    return None if factor == divisor == 1.0 else Scale(factor, divisor)
