"""A plain torchrun script. Two lines use disttrain: the import, and the report after each step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import disttrain

STEPS = 50


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        disttrain.report(step=step, total=STEPS, loss=loss, rate=optimizer.param_groups[0]["lr"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
