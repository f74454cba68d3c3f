"""What communication takes from the thread that trains, and that thread from communication.

The training thread has a processor of its own; everything else (foreprop's threads and servers,
gloo's thread and the other rank) has the others. So a training thread that is slower while slices
move waits for the interpreter, not for a processor.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop_lab.benchmarks.wire import WirePair, encryption

WAITS, EAGER, BARE, LOGS = "waits", "eager layers", "bare operations", "logs in Python"
_BUCKET_BYTES = 25 * 2**20
"""DDP's default, ``bucket_cap_mb``."""
_ALONE_S = 0.1
_LOOK_EVERY_S = 1e-3
_LONGEST_S = 20.0
"""An exchange that the training thread starves is cut off, and its rate is of what has come."""
_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCost:
    """Medians over rounds; ``bits_per_s`` count payload in one direction of two."""

    plane: str
    thread: str
    alone_us: float
    """Microseconds per operation with nothing to send."""
    slow_down: float
    """Time per operation while slices move, over the time alone just before."""
    bits_per_s: float
    of_waiting: float
    """The rate over that of the same round beside a thread that waits."""


class _Plane(Protocol):
    """Something that exchanges the same bytes in each step."""

    one_way_bytes: int

    def start(self) -> None:
        """Let one step's bytes go, as an optimizer's step does."""

    def share_done(self) -> float:
        """The share of them that has come back, from 0 to 1."""

    def finish(self) -> None:
        """Wait for the rest."""

    def close(self) -> None: ...


class _Foreprop:
    """Two ranks with their servers, where workers update: the default. This is rank 0."""

    def __init__(
        self, *, slice_elems: int, slices: int, staged: bool = False, **settings: Any
    ) -> None:
        config = Config.resolve("p3", slice_elems=slice_elems, update="workers", **settings)
        self.one_way_bytes = 4 * slice_elems * slices
        self._folder = TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._connection, other = multiprocessing.Pipe()
        self._peer = multiprocessing.get_context("spawn").Process(
            target=_serve_foreprop, args=(other, store, slices, config, staged), daemon=True
        )
        self._peer.start()
        self._pair = WirePair(slices, config, world=_world(0, store), staged=staged)

    def start(self) -> None:
        self._connection.send(True)
        self._pair.start()

    def share_done(self) -> float:
        return self._pair.arrived() / len(self._pair.parameters)

    def finish(self) -> None:
        self._pair.finish()

    def close(self) -> None:
        self._connection.send(False)
        self._pair.close()
        self._peer.join()
        self._folder.cleanup()


def _world(rank: int, store: Path) -> World:
    both = FileStore(str(store), 2)
    return World(rank=rank, size=2, local_size=1, host="127.0.0.1", store=both, raw_store=both)


def _serve_foreprop(
    connection: Connection, store: Path, slices: int, config: Config, staged: bool
) -> None:
    pair = WirePair(slices, config, world=_world(1, store), staged=staged)
    while connection.recv():
        pair.start()
        pair.finish()
    pair.close()


class _Gloo:
    """All-reduces of DDP's buckets, by the backend that DDP has without GPUs."""

    def __init__(self, one_way_bytes: int) -> None:
        self.one_way_bytes = one_way_bytes
        self._folder = TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._connection, other = multiprocessing.Pipe()
        arguments = (other, store, one_way_bytes)
        self._peer = multiprocessing.get_context("spawn").Process(
            target=_serve_gloo, args=arguments, daemon=True
        )
        self._peer.start()
        self._group, self._buckets = _join_gloo(0, store, one_way_bytes)
        self._works: list[dist.Work] = []

    def start(self) -> None:
        self._connection.send(True)
        self._works = _reduce(self._group, self._buckets)

    def share_done(self) -> float:
        return sum(work.is_completed() for work in self._works) / len(self._works)

    def finish(self) -> None:
        for work in self._works:
            work.wait()

    def close(self) -> None:
        self._connection.send(False)
        self._peer.join()
        self._folder.cleanup()


def _join_gloo(  # torch has no types for what its backends do
    rank: int, store: Path, one_way_bytes: int
) -> tuple[Any, list[torch.Tensor]]:
    group = dist.ProcessGroupGloo(FileStore(str(store), 2), rank, 2, timedelta(seconds=60))
    left, sizes = one_way_bytes, []
    while left:
        sizes.append(min(left, _BUCKET_BYTES))
        left -= sizes[-1]
    return group, [torch.ones(size // 4) for size in sizes]


def _reduce(group: Any, buckets: list[torch.Tensor]) -> list[dist.Work]:
    return [group.allreduce([bucket]) for bucket in buckets]


def _serve_gloo(connection: Connection, store: Path, one_way_bytes: int) -> None:
    torch.set_num_threads(1)
    group, buckets = _join_gloo(1, store, one_way_bytes)
    while connection.recv():
        for work in _reduce(group, buckets):
            work.wait()


def _training_threads() -> dict[str, Callable[[], int]]:
    """Kinds of training threads: each function makes a few operations and counts them."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(50)))
    features, total, lines = torch.randn(8, 16), torch.zeros(16), io.StringIO()
    log, handler = logging.Logger("trainer"), logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s:%(lineno)d %(message)s"))
    log.addHandler(handler)

    def wait() -> int:
        time.sleep(5e-4)
        return 1

    def launch() -> int:
        """Layers so small that a call's cost is its launch: about 8 us, as a kernel's on a GPU."""
        layers(features)
        return 50

    def operate() -> int:
        for _ in range(100):
            total.add_(1.0)
        return 100

    def write() -> int:
        for number in range(20):
            log.info("step %d: loss %.4f, %.1f samples/s", number, 0.5, 1e3)
        lines.seek(0)
        lines.truncate()
        return 20

    return {WAITS: wait, EAGER: launch, BARE: operate, LOGS: write}


def measure_trainer(
    *,
    slices_kb: list[float],
    servers: list[int],
    slices: int,
    rounds: int,
    encrypted: bool = False,
    compression: str | None = None,
    staged: bool = False,
) -> list[TrainerCost]:
    """All kinds of slices, servers and training threads, and gloo's buckets, in turns.

    An exchange has ``slices`` slices, whatever their size, and gloo's as many bytes as the
    largest slices. Bits are those of gradients, whatever ``compression`` makes of them. ``staged``
    ones are copied first, as a GPU's are (`staged`). Raises `ConfigError` where there are not two
    processors.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        raise ConfigError(
            "this pins the training thread apart from all others, and may use one processor:"
            " let it have two (taskset)"
        )
    threads = _training_threads()
    found: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, processors)
        os.sched_setaffinity(0, processors[1:])  # inherited by all threads and processes made here
        settings: dict[str, Any] = {"compression": compression, "staged": staged}
        settings |= stack.enter_context(encryption()) if encrypted else {}
        planes = dict(_make_planes(stack, slices_kb, servers, slices, settings))
        for plane in planes.values():
            for _ in range(_WARM_UP):
                plane.start()
                plane.finish()
        os.sched_setaffinity(0, processors[:1])
        for _ in range(rounds):
            for name, plane in planes.items():
                waiting = 0.0
                for kind, operate in threads.items():
                    alone_s = _alone_s(operate)
                    busy_s, bits_per_s = _beside(plane, operate)
                    waiting = waiting or bits_per_s
                    row = (alone_s, busy_s / alone_s, bits_per_s, bits_per_s / waiting)
                    found.setdefault((name, kind), []).append(row)
    return [
        TrainerCost(
            plane=name,
            thread=kind,
            alone_us=statistics.median(row[0] for row in rows) * 1e6,
            slow_down=statistics.median(row[1] for row in rows),
            bits_per_s=statistics.median(row[2] for row in rows),
            of_waiting=statistics.median(row[3] for row in rows),
        )
        for (name, kind), rows in found.items()
    ]


def _make_planes(
    stack: contextlib.ExitStack,
    slices_kb: list[float],
    servers: list[int],
    slices: int,
    settings: Mapping[str, Any],
) -> Iterator[tuple[str, _Plane]]:
    plane: _Plane
    for count in servers:
        for size_kb in slices_kb:
            for which in ("native", "python"):
                plane = _Foreprop(
                    slices=slices,
                    slice_elems=round(size_kb * 250),
                    servers_per_node=count,
                    plane=which,
                    **settings,
                )
                stack.callback(plane.close)
                yield f"{which}, {size_kb:g} kB, {counted(count, 'server')} a rank", plane
    plane = _Gloo(4 * round(max(slices_kb) * 250) * slices)
    stack.callback(plane.close)
    yield "gloo, DDP's buckets", plane


def _alone_s(operate: Callable[[], int]) -> float:
    """Seconds per operation."""
    taken_s, count = _operate_for(_ALONE_S, operate)
    return taken_s / count


def _beside(plane: _Plane, operate: Callable[[], int]) -> tuple[float, float]:
    """Seconds per operation while one step's bytes move, and their rate."""
    before_start = time.perf_counter()
    plane.start()
    started, operating_s, count, share = time.perf_counter(), 0.0, 0, 0.0
    while share < 1.0 and time.perf_counter() - started < _LONGEST_S:
        taken_s, made = _operate_for(_LOOK_EVERY_S, operate)
        operating_s, count = operating_s + taken_s, count + made
        share = plane.share_done()  # no trainer asks: its time is not the operations'
    ended = time.perf_counter()
    plane.finish()
    return operating_s / count, 8 * share * plane.one_way_bytes / (ended - before_start)


def _operate_for(seconds: float, operate: Callable[[], int]) -> tuple[float, int]:
    """The seconds that it took, and how many operations they were."""
    started, count = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - started) < seconds:
        count += operate()
    return taken_s, count
