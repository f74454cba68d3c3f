"""What a server's shard of a remote table takes: memory and time, as rows are updated."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from foreprop.config import Config
from foreprop.core.manifest import Hyperparameters, Manifest, OptimizerInfo, ParameterInfo
from foreprop.core.rowinit import row_init_of
from foreprop.features.tables.parts import RowPart
from foreprop.features.tables.rowtable import SPARSE_OPTIMIZERS
from foreprop.features.tables.store import RowStore

_GROUP: Hyperparameters = {"lr": 0.1}
_WARM_UP_ROWS = 64


class TableCost(NamedTuple):
    optimizer: str
    table_bytes: int
    """The bytes of all rows' values alone."""
    start_bytes: int
    """How far the process has grown when the server could be asked for rows."""
    peak_bytes: int
    """How far it has ever grown when all updates are done."""
    update_s: float
    """The mean time of an update."""


def measure_tables(
    *, rows: int, row_elems: int, share: float, rows_per_update: int
) -> list[TableCost]:
    """Measure each optimizer in a process of its own: a ``share`` of the rows, far apart, once."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        work = [(name, rows, row_elems, share, rows_per_update) for name in SPARSE_OPTIMIZERS]
        return pool.starmap(_measure, work, chunksize=1)


def _measure(
    optimizer: str, rows: int, row_elems: int, share: float, rows_per_update: int
) -> TableCost:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    _make_store(optimizer, _WARM_UP_ROWS, row_elems, _WARM_UP_ROWS)  # what torch loads at first use
    Path("/proc/self/clear_refs").write_text("5")  # the kernel begins to look for a peak anew
    before_bytes = _peak_bytes()
    store = _make_store(optimizer, rows, row_elems, 0)
    start_bytes = _peak_bytes() - before_bytes
    last, started_s = max(1, round(rows * share)), time.perf_counter()
    for first in range(0, last, rows_per_update):
        numbers = torch.arange(first, min(first + rows_per_update, last)) * (rows // last)
        _update(store, numbers, row_elems)
    updates = -(-last // rows_per_update)
    return TableCost(
        optimizer,
        rows * row_elems * 4,
        start_bytes,
        _peak_bytes() - before_bytes,
        (time.perf_counter() - started_s) / updates,
    )


def _make_store(optimizer: str, rows: int, row_elems: int, updated: int) -> RowStore:
    info = ParameterInfo(
        name="table",
        shape=(rows, row_elems),
        dtype="float32",
        group=0,
        rows=True,
        init=row_init_of("table", None),
    )
    manifest = Manifest(
        foreprop="",
        torch="",
        byteorder=sys.byteorder,
        session="",
        world_size=1,
        knobs=Config().knobs(1),
        optimizer=OptimizerInfo(name=optimizer, groups=(_GROUP,)),
        parameters=(info,),
        blob_bytes=(0,),
    )
    store = RowStore(manifest, manifest.shards(0), 0)
    if updated:
        _update(store, torch.arange(updated), row_elems)
    return store


def _update(store: RowStore, numbers: torch.Tensor, row_elems: int) -> None:
    gradient = RowPart(numbers, torch.ones(len(numbers), row_elems))
    store.rows(0, numbers, 1)  # as workers ask for them before
    store.update(0, [gradient], (_GROUP,))


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024
