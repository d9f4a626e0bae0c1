"""Makes a model compute parts of sequences."""

from torch import nn

from disttrain_api.document_mask import mask_setting
from disttrain_api.parallelism import ContextParallelMethod
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.parallel.context.part import SETTING, Context
from disttrain_trainer.parallel.context.ring import Ring
from disttrain_trainer.parallel.context.ulysses import Ulysses
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World


def compute_parts(module: nn.Module, config: Config, world: World) -> Context:
    """Make the model compute this rank's part of every sequence, and return what says which. Raises
    InvalidConfiguration where it cannot."""
    use_context, name = offered(module, "use_context"), type(module).__name__
    if use_context is None:
        raise InvalidConfiguration(
            f"{SETTING}: the model {name} has no method `use_context`, which makes it compute parts of sequences; add "
            "it, or use `dataParallelShardDegree` instead"
        )
    assert world.context is not None
    ring = config.job.parallelism.context_parallel_method is ContextParallelMethod.RING
    context = Ring(world.context, world.device.channel) if ring else Ulysses(world.context)
    if config.training.compile:
        context.stay_out_of_graphs()
    use_context(context)
    return context


def keep_documents_apart(module: nn.Module, part: Context | None, config: Config, world: World) -> Documents:
    """Make the model's attention stay within documents, and return what says where they begin. part: of sequences that
    is computed, None for all. Raises InvalidConfiguration where it cannot."""
    use_context = offered(module, "use_context")
    if use_context is None:
        setting = mask_setting(config.training.data)
        raise InvalidConfiguration(
            f"`training.data.config.{setting}`: the model {type(module).__name__} has no method `use_context`, by "
            f"which its attention would learn of documents; add it, or remove `{setting}`"
        )
    documents = Documents(part)
    if config.training.compile:
        documents.stay_out_of_graphs(world.device.torch)
    use_context(documents)
    return documents
