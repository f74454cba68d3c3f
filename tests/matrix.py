"""Settings to be combined, and a training that is exact whatever order its sums are made in.

The loss is linear in the parameters, and all numbers are small multiples of powers of two. So a
step's gradient does not depend on the values, every sum is exact, and each update can be counted in
any order, early or late, without another bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foreprop
from foreprop.cluster.world import World
from tests.cluster import run_cluster
from tests.conformance.counting_runs import dedicated

MATRIX: Mapping[str, Mapping[str, Any]] = {
    "dedicated": {"dedicated_servers": 2},
    "ring": {"architecture": "ring"},
    "hybrid": {"architecture": "hybrid"},
    "architecture auto": {"architecture": "auto"},
    "slices auto": {"slice_elems": "auto"},
    "workers": {"update": "workers"},
    "clip norm": {"clip_grad_norm": 1.0},
    "ema": {"ema": 0.5},
    "wire": {"wire_dtype": "bfloat16"},
    "lossless": {"compression": "lossless"},
    "int8": {"compression": "int8"},
    "codecs auto": {"compression": "auto"},
    "dgc": {"compression": "dgc:0.5"},
    "elastic": {"elastic": True},
    "backup": {"backup_workers": 1},
    "staleness": {"staleness": 2},
    "late": {"staleness": "late"},
    "encryption": {"encryption": "tls"},
    "node's workers": {"workers_per_node": 2},
    "node rates": {"node_rates": "1:0.5"},
    "rebalance": {"rebalance_s": 60.0},
    "rows": {"sparse_parameters": "table.weight"},
}
"""By name: what each pair is made of."""
STEPS, LR = 6, 2**-4

Batch = tuple[torch.Tensor, ...]


class Sums(nn.Module):
    """A table and two layers, whose outputs are weighed and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(4, 2)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.arange(parameter.numel()) % (5 + number) - 3
                parameter.copy_(values.view_as(parameter) / 8)

    def forward(self, rows: torch.Tensor, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        weighed = self.table(rows).cumsum(-1).sum() + self.first(x).cumsum(-1).sum()
        return weighed + self.last(z).cumsum(-1).sum()


def batches_of(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return [
        (draw(0, 6, 2), draw(-1, 2, 2, 3).float(), draw(-1, 2, 2, 4).float()) for _ in range(STEPS)
    ]


def ranks_of(settings: Mapping[str, Any]) -> int:
    """So many that two push to servers, and that one may be left out."""
    nodes = 3 if settings.get("backup_workers") else 2
    return nodes * settings.get("workers_per_node", 1)


def data_of(settings: Mapping[str, Any], rank: int) -> list[Batch]:
    """Where not all count, all have the same: whoever counts, the average is that."""
    return batches_of(0 if settings.get("backup_workers") else rank)


def make() -> tuple[Sums, torch.optim.SGD]:
    model = Sums()
    return model, torch.optim.SGD(model.parameters(), LR)


def train(
    settings: Mapping[str, Any], secret: Path, *, each: Callable[[Any, int], None] | None = None
) -> list[dict[str, torch.Tensor]]:
    """The model's values by rank; ``each`` is called before each step with session and step."""
    settings = {"architecture": "p2p", **settings}
    if settings.get("dedicated_servers") and settings["architecture"] == "p2p":
        settings["architecture"] = "ps"
    own = {name: settings[name] for name in ("encryption",) if name in settings}
    if own:
        own["secret_file"] = settings["secret_file"] = str(secret)

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = make()
        with contextlib.ExitStack() as stack:
            if settings.get("dedicated_servers"):
                stack.enter_context(dedicated(world, **own))
            session = stack.enter_context(
                foreprop.parallelize(model, optimizer, world=world, **settings)
            )
            for step, batch in enumerate(data_of(settings, world.rank)):
                if each is not None:
                    each(session, step)
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            session.flush()
            return {name: value.clone() for name, value in model.state_dict().items()}

    local_size = settings.get("workers_per_node", 1)
    return run_cluster(ranks_of(settings), work, local_size=local_size)


def by_hand(settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same in one process, from gradients that are averaged, and clipped as torch does."""
    model, optimizer = make()
    ranks = 1 if settings.get("backup_workers") else ranks_of(settings)
    for batches in zip(*(data_of(settings, rank) for rank in range(ranks)), strict=True):
        optimizer.zero_grad()
        for batch in batches:
            (model(*batch) / ranks).backward()
        if (norm := settings.get("clip_grad_norm")) is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return model.state_dict()
