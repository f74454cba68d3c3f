"""A worker with a remote table much larger than the memory that it is allowed.

Leaves ``rank-N.json`` in the folder ``RESULTS``: what memory it and its server have taken, and the
SHA-256 of some rows.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F

import foreprop

ROWS, WIDTH, STEPS = 20_000_000, 64, 6
TABLE_BYTES = ROWS * WIDTH * 4
ALLOWED_BYTES = TABLE_BYTES // 10


def main() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True, device="meta")
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(4 * WIDTH, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"clip_grad_norm": 0.5, "ema": 0.9, "whole_tables": "none"}
    with foreprop.parallelize(model, optimizer, **settings) as session:
        refused = limit_memory()  # the server, a process of its own, has none
        batches = batches_of(session.rank)
        train(model, optimizer, batches[:3])
        folder = Path(os.environ["RESULTS"]) / f"tables-{session.rank}"
        session.save_tables(folder)
        dense, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, batches[3:])
        after = session.rows("0.weight", torch.cat(batches))
        session.load_tables(Path(os.environ["RESULTS"]) / "tables-0")
        model.load_state_dict(dense)
        optimizer.load_state_dict(state)
        train(model, optimizer, batches[3:])
        again = session.rows("0.weight", torch.cat(batches))
        result = {
            "refused": refused,
            "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "server_rss_bytes": [c.memory_info().rss for c in psutil.Process().children()],
            "sha256": hashlib.sha256(session.rows("0.weight", rows_of_all()).numpy()).hexdigest(),
            "as_before": torch.equal(after, again),
        }
    (Path(os.environ["RESULTS"]) / f"rank-{session.rank}.json").write_text(json.dumps(result))


def limit_memory() -> str:
    """From now on this process may have little more than it has; returns what a table gets."""
    used_bytes = psutil.Process().memory_info().data
    limit_bytes = used_bytes + ALLOWED_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    try:
        torch.zeros(ROWS, WIDTH)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def batches_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randint(ROWS, (STEPS, 8, 4), generator=generator))


def rows_of_all() -> torch.Tensor:
    return torch.cat([batch for rank in range(2) for batch in batches_of(rank)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), batch[:, 0] % 3).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
