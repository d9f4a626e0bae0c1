"""The optimizer's state between this rank's optimizer, which checkpoints read and write, and the servers'."""

from collections.abc import Mapping

import torch
from torch import Tensor

from disttrain_trainer.state import State


def gather_states(state: State) -> dict[str, dict[str, Tensor]]:
    """The tensors of the rank's optimizer by name of the parameter; empty before its first update."""
    found = {name: state.optimizer.state.get(parameter, {}) for name, parameter in state.module.named_parameters()}
    return {
        name: {key: value for key, value in entries.items() if torch.is_tensor(value)}
        for name, entries in found.items()
    }


def scatter_states(state: State, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Make the servers' state that of the rank's optimizer."""
    for name, parameter in state.module.named_parameters():
        if states.get(name):
            # As torch.optim does: numbers of a whole parameter stay on the CPU.
            state.optimizer.state[parameter] = {
                key: value if value.dim() == 0 else value.to(parameter.device) for key, value in states[name].items()
            }
