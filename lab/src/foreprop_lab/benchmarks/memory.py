"""How much memory a job of some ranks takes beside the same job with DDP.

A process's share of memory is its PSS: of a page that several have mapped, such as one of torch's
libraries, its part. A job is its ranks and what these have started, servers above all. Not counted
is this process, which starts the ranks of every job and has their store.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foreprop.config import Config
from foreprop.session.composition import parallelize
from foreprop_lab.benchmarks.workers import run_workers

DDP = "ddp"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "workers": {},
    "servers": {"update": "servers"},
    "elastic": {"elastic": True},
}
"""Settings of foreprop's jobs."""
PARAMETERS = 151_000_000
_WARM_UP_STEPS = 4
_LOOK_S = 0.05
_BLOCKS = 12
_WIDTH_ELEMS = 64
"""The model's width is a multiple of this, for its heads."""

Look = tuple[float, Mapping[int, int]]
"""A moment, and the bytes of each process."""


class Trained(NamedTuple):
    """A rank's result."""

    process: int
    parameters: int
    times_s: Sequence[float]
    """The moments at which the first step that counts began, and at which each ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """A job's memory over the moments at which it was looked at, in the steps that count."""

    kind: str
    parameters: int
    median_bytes: int
    peak_bytes: int
    ranks_bytes: int
    """The ranks' part of the peak; the rest is their servers'."""
    step_s: float


def measure_memory(
    kinds: Sequence[str], *, parameters: int, ranks: int, steps: int
) -> list[JobMemory]:
    """DDP's job and one of each of `KINDS`, one after the other.

    SGD with momentum trains a transformer of about so many parameters, with one thread of torch
    per rank.
    """
    return [_measure(kind, parameters, ranks, steps) for kind in (DDP, *kinds)]


def _measure(kind: str, parameters: int, ranks: int, steps: int) -> JobMemory:
    with _looking() as looks:
        found: dict[int, Trained] = run_workers(ranks, _train, kind, parameters, steps)
    return memory_of(kind, found, looks)


def memory_of(kind: str, found: Mapping[int, Trained], looks: Sequence[Look]) -> JobMemory:
    began_s = max(each.times_s[0] for each in found.values())
    ended_s = min(each.times_s[-1] for each in found.values())
    during = [look for at_s, look in looks if began_s <= at_s <= ended_s]
    if not during:
        raise RuntimeError("the steps were over before anybody had looked: make more of them")
    totals = [sum(look.values()) for look in during]
    most = during[totals.index(max(totals))]
    first = found[0]
    took_s = [b - a for a, b in zip(first.times_s, first.times_s[1:], strict=False)]
    return JobMemory(
        kind=kind,
        parameters=first.parameters,
        median_bytes=int(statistics.median(totals)),
        peak_bytes=max(totals),
        ranks_bytes=sum(most.get(each.process, 0) for each in found.values()),
        step_s=statistics.median(took_s),
    )


@contextlib.contextmanager
def _looking() -> Iterator[Sequence[Look]]:
    """Look at all processes that this one has started, again and again."""
    looks: list[Look] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            now_s = time.monotonic()
            looks.append((now_s, _bytes_by_process()))

    thread = threading.Thread(target=look, name="look")
    thread.start()
    try:
        yield looks
    finally:
        is_over.set()
        thread.join()


def _bytes_by_process() -> dict[int, int]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, ValueError):  # it may just end
            found[child.pid] = _pss_bytes(child.pid)
    return found


def _pss_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.split()[0]) * 1024
    raise ValueError(f"process {process} has no memory any more")


class _Transformer(nn.Module):
    """A model of 144 square matrices; its inputs are vectors, so no gradient is sparse."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = _WIDTH_ELEMS * max(1, round(math.sqrt(parameters / _BLOCKS / 12) / _WIDTH_ELEMS))
        self.width = width
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, _BLOCKS, enable_nested_tensor=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(hidden)
        return output.square().mean()


def _train(kind: str, parameters: int, steps: int) -> Trained:
    torch.set_num_threads(1)
    if KINDS.get(kind, {}).get("elastic"):  # each rank is a node, whose server it has
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    network = _Transformer(parameters)
    count = sum(parameter.numel() for parameter in network.parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    hidden = torch.randn(1, 16, network.width)
    model: nn.Module = network
    session = None
    if kind == DDP:
        model = DistributedDataParallel(network)
    else:
        session = parallelize(network, optimizer, config=Config.resolve(**KINDS[kind]))
    times_s = []
    for step in range(_WARM_UP_STEPS + steps):
        if step == _WARM_UP_STEPS:
            times_s.append(time.monotonic())
        optimizer.zero_grad()
        model(hidden).backward()
        optimizer.step()
        if step >= _WARM_UP_STEPS:
            times_s.append(time.monotonic())
    if session is not None:
        session.close()
    dist.barrier()
    dist.destroy_process_group()
    return Trained(os.getpid(), count, times_s)
