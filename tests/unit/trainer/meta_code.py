"""A user's model that looks at what its rank holds while it is initialised."""

from torch import nn
from torch.distributed.tensor import DTensor

from disttrain_api.builtin import GptConfig
from disttrain_trainer.models.gpt.model import Gpt
from disttrain_trainer.runtime.errors import InvalidConfiguration


class Watchful(Gpt):
    """Ends its rank where, besides the layer in hand, more than half of anything is there."""

    def initialise_layer(self, layer: nn.Module) -> None:
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        for name, parameter in self.named_parameters():
            held = parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
            if id(parameter) not in own and 2 * held > parameter.numel():
                raise InvalidConfiguration(f"{name} is held whole")
        super().initialise_layer(layer)


def watchful() -> nn.Module:
    """Tokens below 16; every size is even."""
    return Watchful(GptConfig(vocabulary_size=16, layers=2, heads=2, width=8, sequence_length=16)).double()


def huge() -> nn.Module:
    """No machine holds its values."""
    return Gpt(GptConfig(layers=100, heads=100, width=100_000, sequence_length=33))
