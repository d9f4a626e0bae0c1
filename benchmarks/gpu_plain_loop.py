"""The reference of gpu_gpt2.py: GPT-2 in a file of its own, compiled with its loss as a whole, in a plain loop.

What somebody writes who trains this one model on one GPU and needs nothing else: no biases, one projection for queries,
keys and values, autocast, a fused AdamW, batches from pinned memory. It shares no code with the trainer.

Run as a program; arguments: job.json, warm-up steps, measured steps, steps per measurement. Prints seconds per step,
one line for each measurement, then the highest memory in GiB.
"""

import json
import os
import sys
import time
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.random_tokens import tokens


class Block(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.projection = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projection(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Tokens [B, T] and their successors [B, T] -> the mean loss."""

    def __init__(self, vocabulary: int, length: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main() -> None:
    training = json.loads(Path(sys.argv[1]).read_text())["training"]
    warm, measured, window = map(int, sys.argv[2:5])
    micro, passes = training["microBatchSize"], training.get("gradientAccumulationSteps", 1)
    sizes, on_gpu = training["model"]["config"], torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    shape = (sizes[name] for name in ("vocabularySize", "sequenceLength", "layers", "heads", "width"))
    model = Gpt(*shape).to(device)
    rate = training["optimizer"]["learningRate"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    samples, _ = tokens(**training["data"]["config"])
    loader = DataLoader(samples, micro, shuffle=True, pin_memory=on_gpu)  # type: ignore[arg-type]
    loss_of = torch.compile(model)
    batches = cycle(loader)
    began = time.perf_counter()
    for step in range(1, warm + measured + 1):
        for _ in range(passes):
            inputs, targets = (values.to(device, non_blocking=True) for values in next(batches))
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(inputs, targets)
            (loss / passes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["maxGradientNorm"])
        optimizer.step()
        optimizer.zero_grad()
        if step % window == 0:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step > warm:
                print((now - began) / window, flush=True)
            began = now
    print(torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
