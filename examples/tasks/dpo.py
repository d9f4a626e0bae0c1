"""Direct preference optimisation (Rafailov et al. 2023, "Direct Preference Optimization", equation 7): the model learns
to prefer one of two answers, without a reward model.

The reference is the model as it begins, as `path` has it: with LoRA it is the model without its adapters, otherwise a
frozen copy, which every rank holds whole.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.data.chats.lines import MAX_LINE_BYTES, Conversation
from disttrain_trainer.data.chats.template import ChatTokenizer
from disttrain_trainer.data.collate import filled_up
from disttrain_trainer.losses import IGNORED, exact
from disttrain_trainer.models.transformers.lora import LoraLinear
from disttrain_trainer.models.transformers.model import build
from disttrain_trainer.protocols import Loss, Mean
from disttrain_trainer.runtime.files import numbered_lines

Answer = tuple[Tensor, Tensor]
"""Tokens, and the successor of each where it is the assistant's, elsewhere IGNORED."""


class Dpo:
    """The class in `training.task.entrypoint`; `training.task.config` has its arguments."""

    def __init__(
        self,
        pairs: str,
        tokenizer: str,
        path: str | None = None,
        config: dict[str, Any] | None = None,
        rank: int = 0,
        alpha: float = 16.0,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        beta: float = 0.1,
        held_out: int = 16,
        length: int = 1024,
    ) -> None:
        """pairs: a file of JSON Lines with `prompt`, `chosen` and `rejected`; the last `held_out` are evaluated.
        tokenizer: a folder. path: a folder with a model, which is trained; else `config`, a new one of this config.
        rank, alpha, targets: of LoRA, without which all of the model is trained. length: the most tokens of a pair."""
        lora = {"rank": rank, "alpha": alpha, "targets": list(targets)} if rank else None
        described = {"path": path, "config": config, "lora": lora, "sequenceLength": length}
        self.config = TransformersConfig.model_validate(described)
        self.beta, self.held_out = beta, held_out
        self.pairs = list(_read(Path(pairs), ChatTokenizer(Path(tokenizer), {}), length))
        self.reference: nn.Module | None = None
        self.adapters: list[LoraLinear] = []

    def model(self) -> nn.Module:
        policy = build(self.config)
        if (path := self.config.path) is not None:
            # Adapters are not in the files; what they are added to keeps its name.
            begun = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
            unlike = policy.load_state_dict(begun.state_dict(), strict=False)
            missing = [name for name in unlike.missing_keys if ".lora_" not in name]
            if missing or unlike.unexpected_keys:
                raise ValueError(f"{path} is another model: {[*missing, *unlike.unexpected_keys][:3]}")
        self.adapters = [part for part in policy.modules() if isinstance(part, LoraLinear)]
        self.reference = None if self.adapters else copy.deepcopy(policy)
        return policy

    def own_weights(self) -> str:
        return "`path` in `training.task.config`"

    def transformers_config(self) -> TransformersConfig:
        return self.config

    def data(self) -> tuple[Sequence[tuple[Answer, Answer]], Sequence[tuple[Answer, Answer]]]:
        at = len(self.pairs) - self.held_out
        return self.pairs[:at], self.pairs[at:]

    def collate(self, samples: Sequence[tuple[Answer, Answer]]) -> Answer:
        """[2 B, T]: all chosen answers, then all rejected ones."""
        tokens, targets = zip(*filled_up([*(s[0] for s in samples), *(s[1] for s in samples)], None), strict=True)
        return torch.stack(tokens), torch.stack(targets)

    def loss(self, model: nn.Module, batch: Answer) -> Loss:
        with torch.no_grad(), self._as_it_began():
            reference = log_probabilities(self.reference or model, batch)
        rewards = self.beta * (log_probabilities(model, batch) - reference)
        chosen, rejected = rewards.chunk(2)
        margins = chosen - rejected
        return Loss(
            -functional.logsigmoid(margins).sum(),
            {
                "margin": Mean(margins.detach().sum(), len(margins)),
                "accuracy": Mean((margins > 0).sum(), len(margins)),
                "reward_chosen": Mean(chosen.detach().sum(), len(margins)),
                "reward_rejected": Mean(rejected.detach().sum(), len(margins)),
            },
        )

    @contextmanager
    def _as_it_began(self) -> Iterator[None]:
        """Inside, adapters add nothing."""
        scaling = [adapter.scaling for adapter in self.adapters]
        try:
            for adapter in self.adapters:
                adapter.scaling = 0.0
            yield
        finally:
            for adapter, factor in zip(self.adapters, scaling, strict=True):
                adapter.scaling = factor


def log_probabilities(model: nn.Module, batch: Answer) -> Tensor:
    """Return the logarithm of the probability of each answer, given its prompt: [2 B]."""
    tokens, targets = batch
    scores = exact(model(tokens))
    losses = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(-1)


def _read(path: Path, tokenizer: ChatTokenizer, length: int) -> Iterator[tuple[Answer, Answer]]:
    for number, line in numbered_lines(path, MAX_LINE_BYTES):
        row, place = json.loads(line), f"{path}: line {number}"
        conversations = [
            Conversation(
                place, [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]
            )
            for answer in ("chosen", "rejected")
        ]
        found = list(tokenizer.encode(conversations))
        if (longest := max(len(tokens) for tokens, _ in found)) > length:
            raise ValueError(f"{place}: {longest} tokens, expected at most {length}")
        chosen, rejected = (
            (tokens[:-1], tokens[1:].where(counted[1:], IGNORED))
            for tokens, counted in ((torch.from_numpy(ids).long(), torch.from_numpy(own)) for ids, own in found)
        )
        yield chosen, rejected
