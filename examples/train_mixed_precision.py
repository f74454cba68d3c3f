"""Mixed precision: autocast, and with float16 a GradScaler, written as for one process.

torchrun --nproc-per-node 2 examples/train_mixed_precision.py                  # bfloat16
torchrun --nproc-per-node 2 examples/train_mixed_precision.py --dtype float16  # and a GradScaler
"""

import argparse
import hashlib
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop


def points(count: int) -> TensorDataset:
    """Points in a plane, and whether each is on a ring (1) or inside of it (0)."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (count,), generator=generator)
    angles = torch.rand(count, generator=generator) * 6.2832
    radius = 0.3 + labels + 0.1 * torch.randn(count, generator=generator)
    places = torch.stack([angles.cos(), angles.sin()], 1) * radius.unsqueeze(1)
    return TensorDataset(places, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":  # each worker of a machine has a GPU (or XPU, NPU, ...) of its own
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
    dtype = getattr(torch, options.dtype)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model = model.append(nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    session = foreprop.parallelize(model, optimizer)
    loader = foreprop.shard(DataLoader(points(1024), batch_size=32, shuffle=True))

    for epoch in range(options.epochs):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # skips the step on all ranks if one has an infinite gradient
            scaler.update()
            losses.append(loss.item())
        if session.rank == 0:
            print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)

    weights = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    digest = hashlib.sha256(b"".join(weights)).hexdigest()
    # one write that includes the line end: all ranks share a terminal
    print(f"rank {session.rank}: SHA-256 of the weights {digest}\n", end="", flush=True)


if __name__ == "__main__":
    main()
