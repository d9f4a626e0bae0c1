"""Linear layers whose products are computed in FP8: `training.float8`, by torchao.float8 as torchtitan does it.

Both factors of a product are scaled to the range of FP8 and rounded, in the forward pass and for both gradients, with
one scale for each tensor or for each row. Parameters, what lies between layers, and the optimizer keep their formats,
so checkpoints are those of the same model without FP8.

Tensor groups cut such a layer as any other. Its factors are then DTensors, of which torch takes the maximum over the
group, so each rank multiplies with the scales that one process would.
"""

from dataclasses import replace

from torch import nn

from disttrain_api.compute import Float8Recipe
from disttrain_trainer.moe.layer import MixtureOfExperts
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.errors import InvalidConfiguration

MULTIPLE = 16
"""Sizes of the factors that GPUs multiply in FP8 are multiples of it."""
_RECIPES = {Float8Recipe.TENSORWISE: "tensorwise", Float8Recipe.ROWWISE: "rowwise"}


def multiply_in_float8(module: nn.Module, recipe: Float8Recipe, device: Device, degree: int = 1) -> str:
    """Let the linear layers of a module that is still whole multiply in FP8, in place, and return a line for the log.

    Not the last one, whose outputs the loss takes, no router of experts, which rounding would send elsewhere, none of
    another class (adapters of LoRA, and the layers that have them), and none with sizes that are no multiples of 16 x
    `degree`, the number of ranks of a tensor group, which share the sizes.
    Raises InvalidConfiguration where none is left, for a GPU without FP8, and where torchao is missing.
    """
    emulated = device.emulates_float8(recipe)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidConfiguration(
            "`training.float8`: the package torchao is not in the image; install `disttrain[fp8]`"
        ) from error
    names = linear_layers(module, degree)
    if not names:
        sizes = f"{MULTIPLE}" if degree == 1 else f"{MULTIPLE} x `parallelism.tensorParallelDegree` {degree}"
        raise InvalidConfiguration(
            "`training.float8`: the model has no nn.Linear, except its last one, whose sizes are multiples of "
            f"{sizes}: remove the field"
        )
    # Rows are padded, too: the gradient of the weights is a product over samples and tokens.
    config = replace(Float8LinearConfig.from_recipe_name(_RECIPES[recipe]), emulate=emulated, pad_inner_dim=True)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in names)
    note = ", emulated on this CPU, which is slower than BF16" if emulated else ""
    return f"{len(names)} linear layers multiply in FP8 ({recipe.value}{note})"


def linear_layers(module: nn.Module, degree: int = 1) -> set[str]:
    """Return the names of those that multiply in FP8; degree: as in multiply_in_float8."""
    multiple = MULTIPLE * degree
    routers = {part.router for part in module.modules() if isinstance(part, MixtureOfExperts)}
    linear = [(name, part) for name, part in module.named_modules() if type(part) is nn.Linear and part not in routers]
    return {name for name, part in linear[:-1] if not part.in_features % multiple and not part.out_features % multiple}
