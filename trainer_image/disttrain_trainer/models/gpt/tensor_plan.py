"""How a Gpt is cut over a tensor group: Megatron-LM's cut (Shoeybi et al. 2019, section 3), optionally with the parts
between the cut layers cut along the sequence (Korthikanti et al. 2022).
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

SEQUENCE = Shard(1)
_WHOLE_SEQUENCE = PrepareModuleInputOutput(
    input_layouts=SEQUENCE,
    desired_input_layouts=Replicate(),
    use_local_input=True,
    output_layouts=Replicate(),
    desired_output_layouts=SEQUENCE,
)


def tensor_plan(sequence: bool, vocabulary: bool, experts: bool = False) -> dict[str, ParallelStyle]:
    """A style per submodule. With `vocabulary` the logits come as a DTensor that is cut along the vocabulary.

    Experts are not cut: every rank of the group has the same tokens there.
    """
    between = SEQUENCE if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embeddings.tokens": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "head.logits": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if vocabulary else Replicate(),
            use_local_output=not vocabulary,
        ),
    }
    if not experts:
        plan |= {
            "blocks.*.feed_forward.0": ColwiseParallel(),
            "blocks.*.feed_forward.2": RowwiseParallel(output_layouts=between),
        }
    if sequence:
        gather = {"input_layouts": SEQUENCE, "desired_input_layouts": Replicate()}
        plan |= {
            "embeddings.dropout": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=SEQUENCE),
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(**gather),
            "blocks.*.norm2": SequenceParallel(),
            "blocks.*.feed_forward": _WHOLE_SEQUENCE if experts else PrepareModuleInput(**gather),
            "head.norm": SequenceParallel(),
        }
    return plan
