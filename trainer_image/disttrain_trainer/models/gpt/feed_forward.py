"""The feed-forward part of a block: one network, or experts of which a router picks some for each token."""

from torch import nn

from disttrain_api.builtin import EXPERTS_PER_TOKEN, Activation, GptConfig
from disttrain_trainer.moe.experts import FeedForwardExperts
from disttrain_trainer.moe.layer import MixtureOfExperts

AUXILIARY_LOSS_WEIGHT = 0.01
Z_LOSS_WEIGHT = 0.001


def feed_forward(config: GptConfig) -> nn.Module:
    """[B, T, D] -> [B, T, D] with a hidden width of 4 D."""
    width, hidden = config.width, 4 * config.width
    approximate = "tanh" if config.activation is Activation.GELU_TANH else "none"
    if config.experts is None:
        expand = nn.Linear(width, hidden, bias=config.bias)
        contract = nn.Linear(hidden, width, bias=config.bias)
        return nn.Sequential(expand, nn.GELU(approximate), contract)
    return MixtureOfExperts(
        FeedForwardExperts(config.experts, width, hidden, approximate=approximate),
        config.experts,
        width,
        per_token=config.experts_per_token or EXPERTS_PER_TOKEN,
        capacity_factor=config.capacity_factor,
        auxiliary_loss_weight=_given(config.auxiliary_loss_weight, AUXILIARY_LOSS_WEIGHT),
        z_loss_weight=_given(config.z_loss_weight, Z_LOSS_WEIGHT),
    )


def last_layer(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the part of a `feed_forward` that writes to the residual stream: a layer and the name of its weight."""
    if isinstance(module, MixtureOfExperts):
        return module.experts, "contract"
    return module.get_submodule("2"), "weight"


def _given(value: float | None, absent: float) -> float:
    return absent if value is None else value
