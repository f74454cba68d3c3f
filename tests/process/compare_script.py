"""A user's script for the tests of ``foreprop compare``: foreprop's two lines, and a fault if told.

``compare_script.py STEPS [FAULT]``; the faults are in `FAULTS`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop

BATCH = 8
FAULTS = ("none", "accumulate", "elsewhere", "unseeded", "bare", "early", "crash", "ddp", "tidy")


class Net(nn.Module):
    """With a way around its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.last = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(x))
        return found


def main(steps: int, fault: str) -> None:
    if fault == "early":
        raise ValueError("no data here")
    if fault == "tidy":
        dist.init_process_group("gloo")
    torch.manual_seed(int.from_bytes(os.urandom(4)) if fault == "unseeded" else 0)
    data = torch.Generator().manual_seed(3)
    count = 2 * BATCH * steps
    samples = TensorDataset(
        torch.randn(count, 6, generator=data), torch.randint(3, (count,), generator=data)
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    if fault != "bare":
        session = foreprop.parallelize(model, optimizer)
    wrapped = nn.parallel.DistributedDataParallel(model) if fault == "ddp" else model
    loader = foreprop.shard(DataLoader(samples, batch_size=BATCH, shuffle=True))
    passes = 2 if fault == "accumulate" else 1
    for number, (x, y) in enumerate(loader, 1):
        score = model.score if fault == "elsewhere" else wrapped
        (F.cross_entropy(score(x), y) / passes).backward()
        if fault == "crash" and number == 3 and os.environ["RANK"] == "1":
            raise ValueError("the third batch is bad")
        if number % passes == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if fault == "tidy":
        session.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "none")
