"""Two ranks with a collective of their own in each step; rank 1 catches an error, and exits."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import foreprop
from tests.process.forked import fork_servers


def main(code: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    dist.init_process_group("gloo")
    session = foreprop.parallelize(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).pow(2).sum().backward()
        optimizer.step()
        if session.rank == 1 and step == 3:
            print("rank 1 has had enough", flush=True)
            sys.exit(code)
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    fork_servers(int(os.environ.get("FORK_SERVERS", "0")))
    main(int(os.environ["EXIT_CODE"]))
