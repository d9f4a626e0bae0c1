"""Low-rank adapters (Hu et al. 2021, "LoRA"): beside a frozen projection W a product B A is trained.

Names are those of Hugging Face's peft: `q_proj.lora_A.weight`, `q_proj.lora_B.weight`.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from disttrain_api.transformers_config import LoraConfig
from disttrain_trainer.runtime.errors import InvalidConfiguration


class Down(nn.Linear):
    """A: [..., I] -> [..., R]; torch's own initial values of a linear layer, as peft's."""


class Up(nn.Linear):
    """B: [..., R] -> [..., O]; zero at first, so that the model begins as it is without adapters."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class LoraLinear(nn.Linear):
    """[..., I] -> [..., O]: W x + b + alpha / rank * B A dropout(x)."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        """Takes over the parameters of `base`."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = Down(base.in_features, config.rank, bias=False)
        self.lora_B = Up(config.rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.scaling = config.alpha / config.rank

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        adapted: Tensor = self.lora_B(self.lora_A(self.dropout(input)))
        return super().forward(input) + adapted * self.scaling


def add_adapters(model: nn.Module, layers: Iterable[nn.Module], config: LoraConfig) -> None:
    """Put an adapter beside each target of each layer, and freeze everything else of the model; in place.

    Raises InvalidConfiguration for a target that a layer has not.
    """
    model.requires_grad_(False)
    for layer in layers:
        projections = {
            name.rpartition(".")[2]: (name, part) for name, part in layer.named_modules() if isinstance(part, nn.Linear)
        }
        for target in config.targets:
            if target not in projections:
                raise InvalidConfiguration(
                    f"`training.model.config.lora.targets`: the layers have no `{target}`, expected some of "
                    f"{', '.join(projections)}"
                )
        for target in dict.fromkeys(config.targets):
            name, base = projections[target]
            owner, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(owner), attribute, LoraLinear(base, config))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def merged(base: Tensor, down: Tensor, up: Tensor, config: LoraConfig) -> Tensor:
    """Return the projection that computes what `base` and its adapter do together."""
    return base + (up @ down) * (config.alpha / config.rank)
