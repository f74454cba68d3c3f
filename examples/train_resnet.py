"""A small ResNet with a validation loop, checkpoints and resume, on images generated here.

torchrun --nproc-per-node 2 examples/train_resnet.py --epochs 4
torchrun --nproc-per-node 2 examples/train_resnet.py --epochs 8  # goes on
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop

CLASSES = 4


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def resnet(width: int = 8) -> nn.Module:
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Block(width << n, width << (n + 1), 2) for n in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 3, CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


def images(count: int, seed: int) -> TensorDataset:
    """Noise with a bright stripe, whose place is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pictures = torch.randn(count, 3, 16, 16, generator=generator)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        picture[:, 4 * label : 4 * label + 4] += 1
    return TensorDataset(pictures, labels)


def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The share of right answers over all ranks' samples.

    `shard` repeats some samples to fill the last batch, as DistributedSampler does.
    """
    counts = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right = model(x.to(device)).argmax(1) == y.to(device)
            counts += torch.stack([right.sum(), torch.tensor(len(y), device=device)])
    model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/resnet"))
    options = parser.parse_args()
    if dist.is_torchelastic_launched():  # for accuracy() only: foreprop needs no process group
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    model = resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    session = foreprop.parallelize(model, optimizer, resume=options.checkpoints)
    order = torch.Generator()  # seeded alike on all ranks, anew in each epoch
    loader = foreprop.shard(
        DataLoader(images(256, seed=1), batch_size=16, shuffle=True, generator=order)
    )
    validation = foreprop.shard(DataLoader(images(64, seed=2), batch_size=32))

    loop = foreprop.checkpoint(options.checkpoints, every=6, loader=loader, schedule=schedule)
    for epoch in loop.epochs(options.epochs):
        order.manual_seed(epoch)
        for x, y in loop:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        schedule.step()
        right = accuracy(model, validation, device)
        if session.rank == 0:
            print(f"epoch {epoch + 1}: validation accuracy {100 * right:.1f} %", flush=True)

    # one write that includes the line end: all ranks share a terminal
    print(f"rank {session.rank}: SHA-256 of the weights {digest(model)}\n", end="", flush=True)
    session.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def digest(model: nn.Module) -> str:
    """SHA-256 of the parameters; BatchNorm's running averages are each rank's own."""
    weights = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


if __name__ == "__main__":
    main()
