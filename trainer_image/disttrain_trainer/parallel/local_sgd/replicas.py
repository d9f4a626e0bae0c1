"""Replicas that train alone and meet now and then: the shell around sync_schedule.py and update.py.

Local SGD (Stich 2019) averages the parameters every `period` steps; post-local SGD (Lin et al. 2020) sums gradients in
the first steps; DiLoCo (Douillard et al. 2023) and BMUF (Chen and Huo 2016) make more of the average. The replicas are
not wrapped in DDP. Each takes the mean loss of its own samples, and counts as much as the others in an average.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_api.relaxed import OptimizerState
from disttrain_trainer.parallel.average import average
from disttrain_trainer.parallel.data_parallel import average_gradients, share_buffers
from disttrain_trainer.parallel.local_sgd.sync_schedule import Averaging, Plan
from disttrain_trainer.parallel.local_sgd.update import Update
from disttrain_trainer.parallel.share import share
from disttrain_trainer.runtime.mesh import World


@dataclass(frozen=True)
class Groups:
    """Whom this rank meets."""

    all: dist.ProcessGroup
    pod: dist.ProcessGroup
    """The same as `all` where pods have no meetings of their own."""


class Replicas:
    """This rank's replica, and what it knows of all. Whoever meets another is called by all ranks together."""

    def __init__(
        self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer, world: World, groups: Groups, plan: Plan,
        update: Update | None, optimizer_state: OptimizerState,
    ) -> None:  # fmt: skip
        """`update`: what is made of the average of all; None takes it as it is."""
        self.name = f"{name} over {groups.all.size()} replicas"
        """What a checkpoint holds of a replica belongs to: other replicas cannot use it."""
        self.bytes = 0
        """Bytes that this rank has sent for the present step."""
        self.own: dict[str, Tensor] = {}
        """Copies of what this replica holds, while it stands for all (see `agreed`)."""
        self._module, self._optimizer, self._world, self._groups = module, optimizer, world, groups
        self.plan, self._update, self._optimizer_state = plan, update, optimizer_state
        self._trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._model: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        share((*module.parameters(), *module.buffers()), groups.all)
        self.set_out()

    def alone(self, done: int) -> bool:
        """Whether this replica takes the step after `done` ones by its own gradient."""
        return not self.plan.sums_gradients(done)

    def settle_gradients(self, done: int) -> None:
        """Make the gradients those of the step after `done` ones: of all replicas as long as these sum them up.

        What a replica's samples do not use has a zero gradient there, so that all replicas take the same kind of step.
        """
        self.bytes = 0
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self.alone(done):
            self.bytes += average_gradients(self._trained.values(), self._world)

    @torch.no_grad()
    def synchronize(self, done: int) -> None:
        """Do what is due after the optimizer's step number `done`."""
        if not self.alone(done - 1):
            share_buffers(self._module, self._world)
            self._remember()
            return
        match self.plan.averaging(done):
            case Averaging.POD:
                self._average(self._groups.pod)
            case Averaging.ALL:
                self._average(self._groups.all)
                share_buffers(self._module, self._world)
                self._end_block(done)
            case Averaging.NONE:
                pass

    @contextmanager
    def agreed(self, done: int, *, optimizer: bool = False) -> Iterator[None]:
        """Inside, all replicas hold the model that counts after `done` steps; `own` is what this one holds besides.

        That model is the average of all as they are, or where something else is made of the average, the global model
        of the last averaging. With `optimizer` the optimizer's state is the average, too. Buffers are the caller's to
        share. Afterwards everything is as it was before.
        """
        held = self._held(optimizer=optimizer)
        self.own = {name: value.detach().clone() for name, value in held.items()}
        try:
            with torch.no_grad():
                self._agree(done, optimizer=optimizer)
            yield
        finally:
            _put(self.own, held)
            self.own = {}

    @property
    def momentum(self) -> Mapping[str, Tensor]:
        """Return the state for the next update, by parameter, the same on every rank; empty without an update."""
        return self._momentum

    @property
    def kept(self) -> list[Tensor]:
        """Return what is there beside the module from one step to the next."""
        return [*self._model.values(), *self._momentum.values()]

    def go_on(self, own: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        """Go on as the replica that held `own` (see `agreed`), when the module holds the model that counted then."""
        self.set_out()
        _put(momentum, self._momentum)
        _put(own, self._held(optimizer=True))

    @torch.no_grad()
    def set_out(self) -> None:
        """Begin with the module's parameters, which are alike on every rank, and without momentum."""
        if self._update is None:
            return
        self._model = {name: value.detach().clone() for name, value in self._trained.items()}
        self._momentum = {name: torch.zeros_like(value) for name, value in self._model.items()}

    def _remember(self) -> None:
        """The replicas' common parameters are the global model."""
        _put({name: self._trained[name] for name in self._model}, self._model)

    def _end_block(self, done: int) -> None:
        """From the average of all, which the module holds, to the global model and where the next block begins."""
        if self._update is None:
            return
        if self.plan.takes_average(done):
            self._remember()
            return
        for name, parameter in self._trained.items():
            block = self._update(self._model[name], parameter, self._momentum[name])
            self._model[name].copy_(block.model)
            self._momentum[name].copy_(block.momentum)
            # Nothing comes after the last block: the run ends with its model.
            parameter.copy_(block.model if done == self.plan.steps else block.start)

    def _average(self, group: dist.ProcessGroup) -> None:
        """Parameters, and optimizer state as it is to be treated."""
        self.bytes += average(self._trained.values(), group)
        match self._optimizer_state:
            case OptimizerState.AVERAGE:
                self.bytes += average(self._moments(), group)
            case OptimizerState.RESET:
                # Zeros are what torch's optimizers begin with.
                for value in self._state_of_optimizer().values():
                    value.zero_()
            case OptimizerState.KEEP:
                pass

    def _agree(self, done: int, *, optimizer: bool) -> None:
        if self._update is not None:
            _put(self._model, self._trained)
        elif not self.plan.together(done):
            average(self._trained.values(), self._groups.all)
        if optimizer:
            average(self._moments(), self._groups.all)

    def _held(self, *, optimizer: bool) -> dict[str, Tensor]:
        """Parameters and buffers, with `optimizer` its state, by a name of their own."""
        return {
            **{f"parameter/{name}": value for name, value in self._trained.items()},
            **{f"buffer/{name}": value for name, value in self._module.named_buffers()},
            **(self._state_of_optimizer() if optimizer else {}),
        }

    def _state_of_optimizer(self) -> dict[str, Tensor]:
        return {
            f"optimizer/{name}/{kind}": value
            for name, parameter in self._trained.items()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if torch.is_tensor(value)
        }

    def _moments(self) -> list[Tensor]:
        """The optimizer's state but for its counts of steps, which all replicas have in common."""
        return [value for value in self._state_of_optimizer().values() if value.dim() > 0]


@torch.no_grad()
def _put(values: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    """Copy each value to the place of its name, where there is one."""
    for name in values.keys() & places.keys():
        places[name].copy_(values[name])
