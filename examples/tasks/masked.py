"""Batches that are dictionaries with masks: restore hidden tokens of sequences of different lengths.

A sequence repeats two tokens in turn, and some are hidden: the model has to look two places further.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.protocols import Loss, Mean

TOKENS, HIDDEN = 16, 16
Batch = dict[str, Tensor]


class Sequences:
    """Sample i depends only on i, so it is the same on every rank."""

    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(self.indices[index])
        pair = torch.randint(TOKENS, (2,), generator=generator)
        tokens = pair.repeat(int(torch.randint(3, 8, (), generator=generator)))
        return {"tokens": tokens, "hidden": torch.rand(len(tokens), generator=generator) < 0.2}


class Restorer(nn.Module):
    """[B, T] tokens, some of them HIDDEN -> [B, T, TOKENS] scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS + 1, width)
        self.look = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        x = self.embed(tokens) * present.unsqueeze(-1)
        scores: Tensor = self.out(self.look(x.transpose(1, 2)).transpose(1, 2).relu())
        return scores


class Masked:
    """The class in `training.task.entrypoint`; `training.task.config` has its arguments."""

    def __init__(self, width: int = 64, size: int = 4000) -> None:
        self.width, self.size = width, size

    def model(self) -> nn.Module:
        return Restorer(self.width)

    def data(self) -> tuple[Sequences, Sequences]:
        return Sequences(range(self.size // 10, self.size)), Sequences(range(self.size // 10))

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Pad sequences to the longest of the batch; `present` says which tokens are real."""
        filled = {key: nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True) for key in samples[0]}
        present = nn.utils.rnn.pad_sequence([torch.ones_like(s["hidden"]) for s in samples], batch_first=True)
        return {**filled, "present": present}

    def weight(self, batch: Batch) -> float:
        """The loss is a mean over hidden tokens, whose number differs between batches."""
        return float(batch["hidden"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens, hidden = batch["tokens"], batch["hidden"]
        scores = model(tokens.masked_fill(hidden, HIDDEN), batch["present"])[hidden]
        loss = functional.cross_entropy(scores, tokens[hidden], reduction="sum")
        return Loss(loss, {"restored": Mean((scores.argmax(-1) == tokens[hidden]).sum(), hidden.sum())})
