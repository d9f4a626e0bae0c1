"""Tensors from stage to stage, one direction at a time, while both compute."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.runtime import json_collectives
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.json_collectives import Form, form_of


class Outbox:
    """Sends tensors to one peer, in order, and goes on at once."""

    def __init__(self, peer: int, group: dist.ProcessGroup, depth: int, *, announces: bool) -> None:
        """peer: global rank. depth: messages after which the first of them has been received for sure.

        announces: the peer does not know the form of the tensors.
        """
        self._peer, self._group, self._depth, self._announces = peer, group, depth, announces
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._form: Form | None = None

    def send(self, tensor: Tensor) -> None:
        """Raises InvalidConfiguration where tensors are not all alike, or have no gradients."""
        self._hold_to_one_form(form_of(tensor))
        if len(self._under_way) == self._depth:
            self._settle_first()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._peer, group=self._group)
        assert work is not None
        # The memory must stay until it is sent.
        self._under_way.append((work, tensor))

    def settle(self) -> None:
        """Wait until all is received."""
        while self._under_way:
            self._settle_first()

    def _hold_to_one_form(self, form: Form) -> None:
        if self._form is None:
            if not form[1].is_floating_point:
                raise InvalidConfiguration(
                    f"`parallelism.pipeline`: a stage gave {_text(form)}: what goes from stage to stage must have "
                    "gradients; let the layers exchange floating-point numbers"
                )
            self._form = form
            if self._announces:
                json_collectives.send(form, Form, self._peer, self._group)
        elif form != self._form:
            raise InvalidConfiguration(
                f"`parallelism.pipeline`: a stage gave {_text(form)} after {_text(self._form)}: all microbatches must "
                "have one shape; pad the samples, or use no pipeline"
            )

    def _settle_first(self) -> None:
        work, _ = self._under_way.popleft()
        work.wait()


class Inbox:
    """Receives tensors of one form from one peer, in order; the next one may arrive while this rank computes."""

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._coming: tuple[dist.Work, Tensor] | None = None
        self._form: Form | None = None

    def take_form(self, tensor: Tensor) -> None:
        """Expect messages with the shape and type of this tensor."""
        self._form = form_of(tensor)

    def expect(self) -> None:
        """Let the next tensor come, unless it is on its way already. The first of all tells its form."""
        if self._coming is None:
            shape, dtype = self._form = self._form or self._announced()
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(tensor, self._peer, group=self._group)
            assert work is not None
            self._coming = (work, tensor)

    def receive(self) -> Tensor:
        """The next tensor."""
        self.expect()
        assert self._coming is not None
        work, tensor = self._coming
        self._coming = None
        work.wait()
        return tensor

    def _announced(self) -> Form:
        form: Form = json_collectives.receive(Form, self._peer, self._group)
        return form


def _text(form: Form) -> str:
    shape, dtype = form
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
