"""The reference of gpu_gpt2.py: the same model, compiled with its loss as a whole, in a loop that does nothing else.

Run as one rank; arguments: job.json, warm-up steps, measured steps, steps per measurement. Prints seconds per step, one
line for each measurement, then the highest memory in GiB.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.tasks.supervised import build_model, load_data


def main() -> None:
    training = JobConfig.model_validate_json(Path(sys.argv[1]).read_bytes()).training
    warm, measured, window = map(int, sys.argv[2:5])
    device = find_device(0, 1, threads_given=True)
    torch.manual_seed(training.seed)
    model = build_model(training).to(device.torch)
    rate, on_gpu = training.optimizer.learning_rate, device.kind == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=on_gpu)
    loader = DataLoader(load_data(training).training, training.micro_batch_size, shuffle=True, pin_memory=on_gpu)

    @torch.compile
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    batches = iter(loader)
    began = time.perf_counter()
    for step in range(1, warm + measured + 1):
        inputs, targets = (values.to(device.torch, non_blocking=True) for values in next(batches))
        with torch.autocast(device.kind, torch.bfloat16):
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % window == 0:
            device.synchronize()
            now = time.perf_counter()
            if step > warm:
                print((now - began) / window, flush=True)
            began = now
    print(device.memory()[1], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
