"""Models whose ranks write down which part of a sequence they compute."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.protocols import ContextPart
from tests.unit.trainer.user_code import double_gpt


def of_parts(function: str, **config: Any) -> dict[str, Any]:
    """Model from this file."""
    return {"entrypoint": f"tests.unit.trainer.context_code:{function}", "config": config}


def watched_gpt(folder: str) -> nn.Module:
    """The small Gpt with dropout; each rank writes a line to `folder` for each microbatch of training."""
    model = double_gpt(dropout=0.1)

    def write(module: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        noise = (outputs == 0).flatten().tolist()
        with Path(folder, f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps({"tokens": inputs[0].tolist(), "noise": noise}) + "\n")

    model.embeddings.register_forward_hook(write)
    return model


def partless() -> nn.Module:
    """A model of tokens that knows no parts of sequences."""
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()


class OwnKernel(nn.Module):
    """A model of tokens with attention of its own to whole sequences."""

    context: ContextPart

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16, dtype=torch.float64)

    def use_context(self, context: ContextPart) -> None:
        self.context = context

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens).unsqueeze(1)
        return self.context.attend(x, x, x, functional.scaled_dot_product_attention).squeeze(1)


def own_kernel() -> nn.Module:
    """See OwnKernel."""
    return OwnKernel()
