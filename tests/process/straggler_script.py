"""A training that goes on until a straggler is named, or gone again, on every rank.

``SLOW`` are rank and seconds that it takes longer in every step, until it has been named;
``RESULTS`` is a folder, where each rank leaves what its ``session.stats()`` has said, in order.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import foreprop

MOST_STEPS = 4000
_FURTHER_STEPS = 16
"""After rank 0 has seen all it waits for: nobody has come so far."""


def main() -> None:
    rank = int(os.environ["RANK"])
    slow_rank, slow_s = os.environ["SLOW"].split(":")
    folder = Path(os.environ["RESULTS"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said: list[Any] = [None]
    stop, named = folder / "stop", folder / "named"
    with foreprop.parallelize(model, optimizer) as session:
        for step in range(1, MOST_STEPS):
            if rank == int(slow_rank) and not named.exists():
                time.sleep(float(slow_s))
            optimizer.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            straggler = session.stats()["straggler"]
            now = straggler and [straggler.rank, straggler.cause, straggler.late_s]
            if (now and now[:2]) != (said[-1] and said[-1][:2]):
                said.append(now)
            if rank == 0 and not stop.exists() and now and now[0] == int(slow_rank):
                named.touch()
            if (
                rank == 0
                and named.exists()
                and not stop.exists()
                and not (now and now[0] == int(slow_rank))
            ):
                (folder / "next").write_text(str(step + _FURTHER_STEPS))
                (folder / "next").rename(stop)  # at once, as a whole
            if stop.exists() and step == int(stop.read_text()):
                break
    (folder / f"rank-{rank}.json").write_text(json.dumps({"said": said}))


if __name__ == "__main__":
    main()
