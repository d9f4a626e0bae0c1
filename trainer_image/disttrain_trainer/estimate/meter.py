"""Counts the bytes of tensors that are alive, without their memory: for tensors of FakeTensorMode."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttrain_trainer.runtime.local import local_part

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class StorageMeter(TorchDispatchMode):
    """Bytes of all storages that are alive: those it was shown, and those that operations inside make."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        """The most that `live` has been."""
        self._sizes: dict[int, int] = {}

    def show(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already, the local part of distributed ones."""
        for tensor in tensors:
            self._see(local_part(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a DTensor does with its local part comes here, too.
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if func is _WAIT and isinstance(args[0], FakeTensor):
            # The collective's own result, of which FakeTensorMode makes another tensor.
            return args[0]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what operations inside make and resize. FSDP2 frees gathered parameters by a resize."""
        original = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(original)  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
            self._count(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        # Without a call in between, at which another thread's storage may end.
        self.live -= size

    def _count(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage._cdata, size)
            return result

        return resize
