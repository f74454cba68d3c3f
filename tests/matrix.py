"""Settings to be combined, and a training that is exact whatever order its sums are made in.

The loss is linear in the parameters, and all numbers are small multiples of powers of two. So a
step's gradient does not depend on the values, every sum is exact, and each update can be counted in
any order, early or late, without another bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foreprop
from foreprop.config import Config
from foreprop.config.combinations import FEATURES
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from tests.cluster import run_cluster
from tests.conformance.counting_runs import Died, dedicated, die
from tests.conformance.node_losses import lose_node

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
_BESIDE: Mapping[str, Any] = {"elastic": True}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "p2p": {"architecture": "p2p"},
    "arrays": {"granularity": "array"},
    "servers": {"update": "servers"},
    "fifo": {"order": "fifo"},
    "one lane": {"lanes": "one"},
    "asked for": {"reply": "notify"},
    "pulled": {"reply": "pull"},
    "own placement": {"placement": "kvstore"},
    "aggregation": {"local_aggregation": "on"},
    "link rate": {"link_rate_bits_per_s": 1e9},
    "late nodes": {"late_nodes": "1"},
    "async": {"staleness": "async"},
    "in step": {"staleness": 0},
    "delay compensation": {"staleness": 2, "delay_compensation": 0.5},
    "fixed": {"elastic": False},
    "max workers": {"elastic": True, "dedicated_servers": 2, "max_workers": 5},
    "replay": {"counted_replay": "."},
    "elastic beside": {"elastic": True},
    "join": {"elastic": True, "dedicated_servers": 2, "join": "10.0.0.1:29600"},
    "clip value": {"clip_grad_value": 1.0},
    "codecs": {"compression": "lossless"},
    "lossy codecs": {"compression": "int4"},
    "lossy sums": {"architecture": "ring", "compression": "randomk:0.1"},
    "unsummed codecs": {"compression": "lossless"},
    "unsummed lossy codecs": {"compression": "topk:0.01"},
    "check stale": {"check_stale": True},
    "elastic node's servers": {**_BESIDE, "servers_per_node": 2},
    **{name: settings for name, settings in MATRIX.items() if name in FEATURES},
}
"""By feature of the table that settings ask for."""
_TABLE = "table.weight"
_BY_PATTERNS: Mapping[frozenset[str], Mapping[str, Any]] = {
    frozenset({"hybrid", "lossless"}): {
        "compression": f"{_TABLE}=lossless",
        "sparse_parameters": _TABLE,
    },
    frozenset({"int8", "rows"}): {"compression": f"{_TABLE}=none,*=int8"},
    frozenset({"dgc", "rows"}): {"compression": f"{_TABLE}=none,*=dgc:0.5"},
}
"""Codecs that are not for every parameter of the model."""
LOSSY = {"int8", "dgc", "codecs auto", "clip norm"}
"""What is rounded. The bits of ``clip norm`` are those of one order of its sum."""
_MOST_OFF = 0.02
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


def leaves_out(settings: Mapping[str, Any]) -> bool:
    """Whether somebody may not count. Then all have the same data, so whoever counts is right."""
    return bool(settings.get("backup_workers") or settings.get("elastic"))


def ranks_of(settings: Mapping[str, Any]) -> int:
    """So many that two nodes push to servers, though one is left out."""
    return (3 if leaves_out(settings) else 2) * settings.get("workers_per_node", 1)


def data_of(settings: Mapping[str, Any], rank: int) -> list[Batch]:
    return batches_of(0 if leaves_out(settings) else rank)


def make() -> tuple[Sums, torch.optim.SGD]:
    model = Sums()
    return model, torch.optim.SGD(model.parameters(), LR)


def together(*names: str) -> dict[str, Any] | None:
    """None if the names are values of one setting, or the table refuses them."""
    settings: dict[str, Any] = {}
    for name in names:
        if settings.keys() & MATRIX[name].keys():
            return None
        settings.update(MATRIX[name])
    if {"workers", "rows"} <= set(names) and {"clip norm", "ema"} & set(names):
        return None  # which `parallelize` finds
    for group, more in _BY_PATTERNS.items():
        settings.update(more if group <= set(names) else {})
    known = {"secret_file": "."} if "encryption" in settings else {}
    try:
        Config.resolve(**settings, **known)
    except ConfigError:
        return None
    return settings


def train(
    settings: Mapping[str, Any], secret: Path, *, killed: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The values by rank, of those that live; ``killed``: the last one dies in a backward pass."""
    found = run_cluster(
        ranks_of(settings),
        lambda world: train_rank(settings, str(secret), world, killed=killed),
        local_size=settings.get("workers_per_node", 1),
    )
    assert (found[-1] is None) == killed
    return [values for values in found if values is not None]


def train_rank(
    settings: Mapping[str, Any], secret: str, world: World | None, *, killed: bool = False
) -> dict[str, torch.Tensor] | None:
    """One rank's values; ``world``: of ranks in threads, and None for processes."""
    on_ps = bool(settings.get("dedicated_servers"))
    settings = {"architecture": "ps" if on_ps else "p2p", **settings}
    own: dict[str, Any] = {}
    if "encryption" in settings:
        own = {"encryption": settings["encryption"], "secret_file": secret}
    model, optimizer = make()
    found = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Died))
        if on_ps and world is not None:
            stack.enter_context(dedicated(world, **own))
        about: Any = {**settings, **own, "world": world}
        session = stack.enter_context(foreprop.parallelize(model, optimizer, **about))
        dies_in = STEPS // 2 if killed and session.rank == session.world_size - 1 else None
        kill = partial(die if on_ps else lose_node, session)
        for step, batch in enumerate(data_of(settings, session.rank)):
            if step == dies_in:
                weight: Any = model.first.weight
                weight.register_hook(lambda _: kill())
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        session.flush()
        found = {name: value.clone() for name, value in model.state_dict().items()}
    return found  # noqa: RET504 - who died has none


def by_hand(settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same in one process, from gradients that are averaged, and clipped as torch does."""
    model, optimizer = make()
    ranks = 1 if leaves_out(settings) else ranks_of(settings)
    for batches in zip(*(data_of(settings, rank) for rank in range(ranks)), strict=True):
        optimizer.zero_grad()
        for batch in batches:
            (model(*batch) / ranks).backward()
        if (norm := settings.get("clip_grad_norm")) is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return model.state_dict()


def check_trained(
    names: Sequence[str], found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> None:
    """What loses nothing has the bits of `by_hand`."""
    most_off = _MOST_OFF if LOSSY & set(names) else 0.0
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=most_off)
