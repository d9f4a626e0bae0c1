"""A push as a server reads it: the tensors of a message become what its shard is updated with.

Nothing that is sent is trusted to fit: Malformed says what does not, and then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

from disttrain_api.parallelism import Compression
from disttrain_trainer.parameter_server.protocol.codec import Piece, ascending, build_codec, require
from disttrain_trainer.parameter_server.protocol.rows import Rows
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message
from disttrain_trainer.parameter_server.server.averaging import AveragingShard, Key
from disttrain_trainer.parameter_server.server.shard import Shard

Updates = Mapping[int | Key, Tensor | Rows]
"""The gradient of each range; where workers update, the change of each of its tensors."""


class PushDecoder:
    """Reads what workers push to one server. `seed`: the job's, from which random places are drawn."""

    def __init__(self, server: int, compression: Compression | None, seed: int) -> None:
        self._server, self._codec = server, build_codec(compression, seed)

    def decode(self, message: Message, task: Task, shard: Shard) -> Updates:
        """Return the content of a push. Raises Malformed.

        `ranges` of the message are those with a gradient, `counts` the number of tensors of each, 1 where it is absent.
        """
        ranges = message.numbers("ranges")
        counts = message.numbers("counts") if "counts" in message.fields else [1] * len(ranges)
        if len(counts) != len(ranges) or sum(counts) != len(message.tensors) or len(set(ranges)) != len(ranges):
            raise Malformed("a push names its tensors' ranges once each")
        rest = iter(message.tensors)
        found: dict[int | Key, Tensor | Rows] = {}
        for index, count in zip(ranges, counts, strict=True):
            if index >= len(shard.lengths):
                raise Malformed(f"range {index} of {len(shard.lengths)}")
            found |= self._range(index, list(islice(rest, count)), task, shard)
        return found

    def _range(self, index: int, tensors: list[Tensor], task: Task, shard: Shard) -> Updates:
        if isinstance(shard, AveragingShard):
            require(tensors, *((held.numel(), held.dtype) for held in shard.tensors(index)))
            return {(index, which): change for which, change in enumerate(tensors)}
        size, number_format = shard.lengths[index], shard.formats[index]
        if shard.widths[index]:
            return {index: _rows(tensors, size // shard.widths[index], shard.widths[index], number_format)}
        return {index: self._codec.decode(tensors, size, number_format, Piece(*task, self._server, index))}


def _rows(tensors: list[Tensor], rows: int, width: int, number_format: torch.dtype) -> Rows:
    count = len(tensors[0]) if tensors else 0
    require(tensors, (count, torch.int64), (count * width, number_format))
    return Rows(ascending(tensors[0], rows), tensors[1].view(-1, width))
