"""Trains with checkpoints, and kills itself as it is told: for the tests of restarts.

``restart_script.py FOLDER``: checkpoints, and what each rank tells, are there. ``KILLS`` is a JSON
list, of which the n-th try does the n-th: ``[rank, step, seconds]``, so long after that step has
begun.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop

EPOCHS, SAMPLES, BATCH, EVERY = 3, 48, 4, 3


class Net(nn.Module):
    """Draws random numbers, and has running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Teller:
    """Appends lines of JSON, each written at once."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"told-{rank}.jsonl"

    def tell(self, **said: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at_s": time.monotonic(), **said}) + "\n")


def my_kill(folder: Path, rank: int) -> tuple[int, float] | None:
    """This try's, if it is this rank's; each rank counts the tries itself."""
    count = folder / f"tries-{rank}"
    number = len(count.read_text()) if count.exists() else 0
    with count.open("a") as file:
        file.write("x")
    kills = json.loads(os.environ.get("KILLS", "[]"))
    if number >= len(kills) or kills[number][0] != rank:
        return None
    _, step, seconds = kills[number]
    return step, seconds


def kill(seconds: float, teller: Teller) -> None:
    """After these seconds, whatever the training does then."""

    def strike() -> None:
        time.sleep(seconds)
        teller.tell(killed=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    teller, told = Teller(folder, rank), my_kill(folder, rank)
    torch.manual_seed(rank)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    saved = folder / "checkpoints"
    session = foreprop.parallelize(model, optimizer, resume=saved)
    numbers = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.randn(SAMPLES, 6, generator=numbers),
        torch.randint(3, (SAMPLES,), generator=numbers),
    )
    loader = foreprop.shard(DataLoader(data, BATCH, shuffle=True))
    loop = foreprop.checkpoint(saved, every=EVERY, loader=loader, schedule=schedule)
    teller.tell(begins=loop.step, world=session.world_size)
    for _ in loop.epochs(EPOCHS):
        for x, y in loop:
            if told is not None and loop.step + 1 == told[0]:
                kill(told[1], teller)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            session.flush()
            teller.tell(step=loop.step)
            time.sleep(0.02)  # so that it can strike between two steps, too
    weights = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
    teller.tell(sha256=hashlib.sha256(weights).hexdigest())
    session.close()


if __name__ == "__main__":
    main()
