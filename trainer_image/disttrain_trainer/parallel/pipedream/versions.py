"""Versions of a rank's weights, of which only those are copied that an update would overwrite while they are needed.

Autograd keeps parameters by reference, and optimizers change them in place. So a microbatch computes with stand-ins:
leaf parameters that share memory with the module's own. An update that would overwrite a version still needed gives
the module's parameters new memory first, and leaves the old one to the stand-ins.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

_StandIns = dict[nn.Parameter, nn.Parameter]


class Versions:
    """The versions that this rank holds, by number; `newest` lies in the module's own parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[nn.Parameter, list[tuple[dict[str, Tensor | None], str]]] = {}
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    self._places.setdefault(parameter, []).append((submodule._parameters, name))
        self._held: dict[int, _StandIns] = {}
        self.newest = 0

    def restart(self) -> None:
        """Number the module's own weights 0 and forget all others."""
        self._held.clear()
        self.newest = 0

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Inside, the module computes with this version; also what a backward pass computes anew."""
        self._put(self._stand_ins(version))
        try:
            yield
        finally:
            self._put({parameter: parameter for parameter in self._places})

    def take_gradients(self, version: int) -> None:
        """Add the gradients that backward passes left at this version to those of the module's own parameters."""
        for parameter, stand_in in self._stand_ins(version).items():
            gradient, stand_in.grad = stand_in.grad, None
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    def make_room(self, needed: Collection[int]) -> None:
        """Before the parameters are changed in place: keep the `needed` versions, drop the others."""
        if self.newest in needed:
            self._stand_ins(self.newest)
            for parameter in self._places:
                parameter.data = parameter.data.clone()
        self._held = {version: held for version, held in self._held.items() if version in needed}

    def updated(self) -> None:
        """The parameters now are the next version."""
        self.newest += 1

    @property
    def count(self) -> int:
        """Versions held."""
        return len({*self._held, self.newest})

    def bytes(self) -> int:
        """Memory of all versions; what two have in common counts once."""
        return _bytes([*self._places, *(stand_in for held in self._held.values() for stand_in in held.values())])

    def bytes_of_newest(self) -> int:
        """Memory of one version."""
        return _bytes(self._places)

    def _stand_ins(self, version: int) -> _StandIns:
        if version == self.newest and version not in self._held:
            # `data` has a version counter of its own: changes of the original later do not count as its changes.
            self._held[version] = {parameter: nn.Parameter(parameter.data) for parameter in self._places}
        return self._held[version]

    def _put(self, chosen: _StandIns) -> None:
        for parameter, places in self._places.items():
            for parameters, name in places:
                parameters[name] = chosen[parameter]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
