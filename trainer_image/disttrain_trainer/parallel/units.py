"""The layers of a model: what is gathered, recomputed and compiled as a whole."""

from torch import nn


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The model's own `layers()`, else the elements of its outermost nn.Sequential and nn.ModuleList; maybe none."""
    offered = getattr(module, "layers", None)
    if callable(offered) and not isinstance(offered, nn.Module):
        return list(offered())
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return list(module.children())
    return [layer for child in module.children() for layer in layers_of(child)]
