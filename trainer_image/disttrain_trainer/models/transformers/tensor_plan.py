"""How a transformers model is cut over a tensor group: Megatron-LM's cut (Shoeybi et al. 2019, section 3), by the
library's names; with `sequence` what lies between the cut layers is cut along the sequence (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from disttrain_trainer.models.transformers.expert_files import DOWN, GATE_UP
from disttrain_trainer.models.transformers.families import Cut, Family
from disttrain_trainer.models.transformers.heads import ColwiseHeads, Heads
from disttrain_trainer.models.transformers.lora_cut import LoraCut
from disttrain_trainer.runtime.errors import InvalidConfiguration

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SEQUENCE = Shard(1)
_LAYER = "model.layers.*"


def tensor_plan(
    family: Family, config: PreTrainedConfig, *, sequence: bool, vocabulary: bool, adapted: Collection[str] = (),
    sparse: Collection[int] = (),
) -> dict[str, ParallelStyle]:  # fmt: skip
    """Return a style per submodule. With `vocabulary` the logits come as a DTensor cut along the vocabulary.

    adapted: the projections that have a LoRA adapter. sparse: the layers with experts, which are not cut: every rank of
    the group has the same tokens there.
    """
    _require_known_styles(family, config)
    dense = [_LAYER]
    if sparse:
        dense = [f"model.layers.{number}" for number in range(config.num_hidden_layers) if number not in sparse]
    between = _SEQUENCE if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if vocabulary else Replicate(),
            use_local_output=not vocabulary,
        ),
    }
    for name, projection in _projections(family.cut, config, between).items():
        has_adapter = name.rpartition(".")[2] in adapted
        for layer in dense if name.startswith("mlp.") else [_LAYER]:
            plan[f"{layer}.{name}"] = projection.with_adapter() if has_adapter else projection.style()
    plan |= {f"{_LAYER}.{name}": style for name, style in _head_norms(family.cut).items()}
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=True)
        plan |= {f"{_LAYER}.{name}": SequenceParallel(use_local_output=True) for name in family.norms}
        plan |= {
            f"{_LAYER}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": _SEQUENCE},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
        }
        for layer in dense:
            plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate())
        for number in sparse:
            plan[f"model.layers.{number}.mlp"] = _whole_sequence()
    return plan


def require_known(family: Family, config: PreTrainedConfig, layer: nn.Module) -> None:
    """Raise InvalidConfiguration for a parameter of the library's layer that other versions of it do not have.

    It would not be cut with the rest; beside experts, which are computed here, it would not even be computed.
    """
    owners = (*_projections(family.cut, config, Replicate()), *_head_norms(family.cut), *family.norms)
    known = {f"{owner}.{kind}" for owner in owners for kind in ("weight", "bias")}
    if family.experts is not None:
        known |= {"mlp.gate.weight", f"mlp.experts.{GATE_UP}", f"mlp.experts.{DOWN}"}
    for name, _ in layer.named_parameters():
        if name not in known:
            import transformers

            raise InvalidConfiguration(
                f"`training.model`: a layer of {family.name} has the parameter `{name}` in transformers "
                f"{transformers.__version__}, which disttrain does not know: install an earlier version"
            )


def _require_known_styles(family: Family, config: PreTrainedConfig) -> None:
    """Raise InvalidConfiguration where the library cuts a layer in another way than the versions that this plan was
    compared with: what it computes between its projections may be another thing, too."""
    known = _styles_of_library(family.cut)
    for pattern, style in (config.base_model_tp_plan or {}).items():
        name = pattern.removeprefix("layers.*.")
        if name == pattern or name.startswith("mlp.experts") or known.get(name) == style:
            continue
        import transformers

        expected = f"'{known[name]}'" if name in known else "not cut there"
        raise InvalidConfiguration(
            f"`parallelism.tensorParallelDegree`: transformers {transformers.__version__} cuts `{name}` of "
            f"{family.name} as '{style}', which disttrain does not know (expected {expected}): install an earlier "
            "version, or use shards"
        )


def _styles_of_library(cut: Cut) -> dict[str, str]:
    """Return how the library cuts a layer, by its own names of styles."""
    if cut is Cut.FUSED:
        gathered, split = "colwise_gather_output", "rowwise_split_input"
        return {
            "self_attn.qkv_proj": gathered,
            "self_attn.o_proj": split,
            "mlp.gate_up_proj": gathered,
            "mlp.down_proj": split,
        }
    # The library gathers queries and keys that are normalised over all heads; our plan gathers them for the norm alone.
    whole = cut is Cut.NORMED_ROWS
    styles = {f"self_attn.{name}": "colwise_gather_output" if whole else "colwise" for name in _ATTENTION}
    styles |= {"self_attn.o_proj": "rowwise_split_input" if whole else "rowwise"}
    if cut is Cut.NORMED_HEADS:
        styles |= {f"self_attn.{name}": "replicated_with_grad_allreduce" for name in _NORMS}
    return styles | {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}


class _Projection(NamedTuple):
    by_output: bool
    inputs: Shard | Replicate
    """How the input lies over the ranks, outputs: how the output does."""
    outputs: Shard | Replicate
    heads: Heads | None = None

    def style(self) -> ParallelStyle:
        if self.heads is not None:
            return ColwiseHeads(self.heads)
        kind = ColwiseParallel if self.by_output else RowwiseParallel
        return kind(input_layouts=self.inputs, output_layouts=self.outputs)

    def with_adapter(self) -> ParallelStyle:
        return LoraCut(by_output=self.by_output, inputs=self.inputs, outputs=self.outputs, heads=self.heads)


def _projections(cut: Cut, config: PreTrainedConfig, between: Shard | Replicate) -> dict[str, _Projection]:
    if cut is Cut.FUSED:
        # One matrix holds several projections: cut in pieces, a rank's would be parts of different ones.
        gathered = _Projection(True, Replicate(), Replicate())
        whole = _Projection(False, Replicate(), between)
        return {
            "self_attn.qkv_proj": gathered,
            "self_attn.o_proj": whole,
            "mlp.gate_up_proj": gathered,
            "mlp.down_proj": whole,
        }
    queries = Heads("num_attention_heads", config.num_attention_heads)
    keys = Heads("num_key_value_heads", config.num_key_value_heads)
    by_output = _Projection(True, Replicate(), Shard(-1))
    by_input = _Projection(False, Shard(-1), between)
    return {
        "self_attn.q_proj": by_output._replace(heads=queries),
        "self_attn.k_proj": by_output._replace(heads=keys),
        "self_attn.v_proj": by_output._replace(heads=keys),
        "self_attn.o_proj": by_input,
        "mlp.gate_proj": by_output,
        "mlp.up_proj": by_output,
        "mlp.down_proj": by_input,
    }


def _head_norms(cut: Cut) -> dict[str, ParallelStyle]:
    """Return the styles of the normalisations of queries and keys."""
    if cut is Cut.NORMED_HEADS:
        # [B, T, heads, D']: each rank normalises its heads, and the weights' gradients are summed over the ranks.
        return {f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in _NORMS}
    return {f"self_attn.{name}": _gathered_inside() for name in _NORMS} if cut is Cut.NORMED_ROWS else {}


_NORMS = ("q_norm", "k_norm")
_ATTENTION = ("q_proj", "k_proj", "v_proj")


def _whole_sequence() -> ParallelStyle:
    """[B, T, D], of which each rank has a part of the sequence before and behind, and all of it inside."""
    return PrepareModuleInputOutput(
        input_layouts=_SEQUENCE,
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=_SEQUENCE,
    )


def _gathered_inside() -> ParallelStyle:
    """[B, T, heads * D'], of which each rank has its heads before and behind, and all of it inside."""
    return PrepareModuleInputOutput(
        input_layouts=Shard(-1),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(-1),
    )
