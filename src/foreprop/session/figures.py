"""A session's figures: totals, what was since the last look, and callbacks every few steps.

Also what a trace says of its session. Only sessions that are asked for figures load this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from foreprop.config import LOGGER, Config
from foreprop.core.lateness import Straggler
from foreprop.core.wire import HEADER_BYTES
from foreprop.engine.metrics import Meter, Metrics, Totals, no_straggler
from foreprop.engine.progress import Counters
from foreprop.engine.status import State, StatusFile
from foreprop.engine.trace import TraceRecorder, trace_path
from foreprop.errors import ConfigError
from foreprop.session.backends import Backends
from foreprop.session.training import Training
from foreprop.version import __version__

MetricsCallback = Callable[[Metrics], object]

_STATUS_EVERY_S = 1.0
_TOTALS = [spec.name for spec in fields(Counters) if spec.name != "waited_s_by_parameter"]


class Follower:
    """Calls back, logs and writes the status file as one rank's steps end. Training thread.

    ``straggler`` is called for each metrics; whoever learns which rank is late replaces it.
    """

    def __init__(self, read: Callable[[], Totals]) -> None:
        self.straggler: Callable[[], Straggler | None] = no_straggler
        self._read = read
        self._callbacks: list[tuple[int, Meter, MetricsCallback]] = []
        self._meter = self._new_meter()
        self._status: StatusFile | None = None
        self._status_meter = self._meter
        self._written_s = 0.0

    def _new_meter(self) -> Meter:
        return Meter(self._read, lambda: self.straggler())

    def metrics(self) -> Metrics:
        return self._meter.since_last()

    def call_every(self, steps: int, callback: MetricsCallback) -> None:
        if steps < 1:
            raise ConfigError(f"steps is {steps}; callbacks are called every 1 step or more")
        self._callbacks.append((steps, self._new_meter(), callback))

    def begin(self, config: Config, session: str, *, rank: int, world_size: int) -> None:
        """Do what the settings ask for: rank 0 logs, and each writes its status once a second."""
        if config.log_steps is not None and rank == 0:
            self.call_every(config.log_steps, lambda metrics: LOGGER.info("%s", metrics))
        if config.watch is not None:
            self._status = StatusFile(config.watch, session, rank, world_size)
            self._status_meter = self._new_meter()
            self._write_status("starting")

    def end_step(self, step: int) -> None:
        """Call back after the step of this number, counted from the start."""
        for every, meter, callback in self._callbacks:
            if step % every == 0:
                callback(meter.since_last())
        if self._status is not None and time.monotonic() - self._written_s >= _STATUS_EVERY_S:
            self._write_status("training", self._status_meter.since_last())

    def end(self, failure: BaseException | None) -> None:
        error = "" if failure is None else f"{type(failure).__name__}: {failure}"
        self._write_status("closed" if failure is None else "failed", None, error)
        self._callbacks.clear()

    def _write_status(self, state: State, metrics: Metrics | None = None, error: str = "") -> None:
        if self._status is None:
            return
        self._written_s = time.monotonic()
        try:
            self._status.write(state, self._read().step, metrics, error)
        except OSError as failed:
            self._status = None
            LOGGER.warning("watch: this rank leaves word no more: %s", failed)


def follow(training: Training) -> Follower:
    """The follower of a session of several processes."""

    def totals() -> Totals:
        counters = _counters_of(training.backends)
        return Totals(
            step=training.completed_before + training.completed,
            waits=counters.waits,
            waited_s=counters.waited_s,
            pushed_bytes=counters.pushed_bytes,
            reply_bytes=counters.reply_bytes,
            queue_depth=_queue_depth_of(training.backends),
            max_queue_depth=counters.max_queue_depth,
        )

    world, follower = training.world, Follower(totals)
    session_id = training.backends.session_id
    follower.straggler = lambda: training.backends.straggler
    follower.begin(training.config, session_id, rank=world.rank, world_size=world.size)
    return follower


def stats_of(training: Training) -> dict[str, Any]:
    backends = training.backends
    counters = _counters_of(backends)
    names = [info.name for info in training.infos]
    return {
        "steps": training.completed_before + training.completed,
        "pushes": counters.pushes,
        "pushed_bytes": counters.pushed_bytes,
        "replies": counters.replies,
        "reply_bytes": counters.reply_bytes,
        "queue_depth": _queue_depth_of(backends),
        "max_queue_depth": counters.max_queue_depth,
        **_of_features(training),
        "straggler": backends.straggler,
        "waits": counters.waits,
        "waited_s": counters.waited_s,
        "waited_s_by_parameter": {
            names[index]: seconds for index, seconds in counters.waited_s_by_parameter.items()
        },
    }


def _counters_of(backends: Backends) -> Counters:
    total = Counters()
    for backend, numbers in backends.parts:
        counters = backend.engine.counters
        for name in _TOTALS:
            setattr(total, name, getattr(total, name) + getattr(counters, name))
        for own, seconds in counters.waited_s_by_parameter.items():
            total.waited_s_by_parameter[numbers[own]] = seconds
    return total


def _queue_depth_of(backends: Backends) -> int:
    return sum(engine.queue_depth for engine in backends.engines)


def _of_features(training: Training) -> dict[str, Any]:
    # only sessions with compression, late uses or members that may leave count these
    found: dict[str, Any] = {}
    backends: list[Any] = [*training.backends.all]
    if codecs := [own.codecs for own in backends if own.codecs is not None]:
        tables = [own.rows for own in backends if getattr(own.engine, "shards", ())]
        found["raw_pushed_bytes"] = sum(own.raw_pushed_bytes for own in (*codecs, *tables))
        found["raw_reply_bytes"] = sum(own.raw_reply_bytes for own in (*codecs, *tables))
    if training.config.staleness == "late":
        found["late_uses"] = sum(each.late_uses for each in training.arrivals)
    for backend in backends:
        members = getattr(backend, "members", None)
        found |= {} if members is None else members.stats()
    return found


def begin_trace(training: Training, folder: str, session_id: str) -> TraceRecorder:
    rank = training.world.rank
    path = trace_path(Path(folder), f"worker-{rank}", session_id)
    trace = TraceRecorder(path, f"worker {rank}", rank, training.config.trace_steps)
    trace.describe(trace_facts(training))
    return trace


def trace_facts(training: Training) -> dict[str, object]:
    world, config = training.world, training.config
    named = {name: parameter for name, parameter, _ in training.user.named}
    nodes = -(-world.size // (config.workers_per_node or world.local_size))
    return facts_of(config, named, ranks=world.size, nodes=nodes)


def facts_of(
    config: Config, named: Mapping[str, torch.nn.Parameter], *, ranks: int, nodes: int
) -> dict[str, object]:
    """What a trace says of its session; sizes are in bytes, as they are sent."""
    return {
        "version": __version__,
        "torch": str(torch.__version__),
        "ranks": ranks,
        "nodes": nodes,
        "servers": config.servers_on(nodes),
        "dedicated_servers": config.dedicated_servers,
        "architecture": config.architecture,
        "update": config.update,
        "order": config.order,
        "slice_elems": config.cut_elems(config.servers_on(nodes)),
        "link_rate_bits_per_s": config.link_rate_bits_per_s,
        "wire_dtype": config.wire_dtype,
        "compression": config.compression,
        "header_bytes": HEADER_BYTES,
        "parameters": [
            {"name": name, "shape": list(p.shape), "itemsize": p.element_size()}
            for name, p in named.items()
            if p.requires_grad
        ],
    }
