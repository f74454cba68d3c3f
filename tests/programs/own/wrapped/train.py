"""A script with DistributedDataParallel left in, in three ways. Its forward pass reads a buffer."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 3)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center.mul_(0.9).add_(0.1 * x.mean(0))
        return self.last(torch.relu(self.norm(self.first(x)))) - self.center.mean()


dist.init_process_group("gloo")
for way in ("given", "inside", "around"):
    torch.manual_seed(3)
    inner = Net()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model = DistributedDataParallel(inner)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        with torch.no_grad():
            model.eval()
            model(torch.randn(8, 6, generator=generator))
        model.train()
        x = torch.randn(8, 6, generator=generator)
        with model.no_sync():  # the first of two backward passes does not communicate
            model(x + 1).square().mean().backward()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(way, "done")
