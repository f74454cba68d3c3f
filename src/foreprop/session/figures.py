"""A session's figures: totals, what was since the last look, and who is told every few steps.

Loaded by sessions that are asked for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from foreprop.config import LOGGER, Config
from foreprop.core.wire import HEADER_BYTES
from foreprop.errors import ConfigError
from foreprop.observe.metrics import HoldUp, Meter, Metrics, Totals, no_straggler
from foreprop.observe.status import State, StatusFile
from foreprop.observe.trace import TraceRecorder, trace_path
from foreprop.version import __version__

if TYPE_CHECKING:
    from foreprop.servers.served import ServedBackend
    from foreprop.session.backends import Backends
    from foreprop.session.training import Training

Told = Callable[[Metrics], object]

_STATUS_EVERY_S = 1.0


class Follower:
    """Tells about one rank's steps as they end. Training thread.

    ``straggler`` is asked whenever something is told: whoever learns which rank is late is put
    there.
    """

    def __init__(self, read: Callable[[], Totals]) -> None:
        self.straggler: Callable[[], HoldUp | None] = no_straggler
        self._read = read
        self._told: list[tuple[int, Meter, Told]] = []
        self._meter = self._new_meter()
        self._status: StatusFile | None = None
        self._status_meter = self._meter
        self._written_s = 0.0

    def _new_meter(self) -> Meter:
        return Meter(self._read, lambda: self.straggler())

    def metrics(self) -> Metrics:
        """Since the last call, or since the beginning."""
        return self._meter.since_last()

    def call_every(self, steps: int, callback: Told) -> None:
        if steps < 1:
            raise ConfigError(f"steps is {steps}; callbacks are called every 1 step or more")
        self._told.append((steps, self._new_meter(), callback))

    def begin(self, config: Config, session: str, *, rank: int, world_size: int) -> None:
        """Do what the settings ask for: rank 0 logs, and each leaves word once a second."""
        if config.log_steps is not None and rank == 0:
            self.call_every(config.log_steps, lambda metrics: LOGGER.info("%s", metrics))
        if config.watch is not None:
            self._status = StatusFile(config.watch, session, rank, world_size)
            self._status_meter = self._new_meter()
            self._leave_word("starting")

    def end_step(self, step: int) -> None:
        """Step ``step`` since the start is over."""
        for every, meter, callback in self._told:
            if step % every == 0:
                callback(meter.since_last())
        if self._status is not None and time.monotonic() - self._written_s >= _STATUS_EVERY_S:
            self._leave_word("training", self._status_meter.since_last())

    def end(self, failure: BaseException | None) -> None:
        """The session is over."""
        error = "" if failure is None else f"{type(failure).__name__}: {failure}"
        self._leave_word("closed" if failure is None else "failed", None, error)
        self._told.clear()

    def _leave_word(self, state: State, metrics: Metrics | None = None, error: str = "") -> None:
        if self._status is None:
            return
        self._written_s = time.monotonic()
        try:
            self._status.write(state, self._read().step, metrics, error)
        except OSError as failed:
            self._status = None
            LOGGER.warning("watch: this rank leaves word no more: %s", failed)


def follow(training: Training) -> Follower:
    """Of a session of several processes: what its settings ask for."""
    world, follower = training.world, Follower(lambda: _totals(training))
    session_id = training.backends.session_id
    follower.straggler = lambda: training.backends.straggler
    follower.begin(training.config, session_id, rank=world.rank, world_size=world.size)
    return follower


def _totals(training: Training) -> Totals:
    counters = training.backends.counters
    return Totals(
        step=training.completed_before + training.completed,
        waits=counters.waits,
        waited_s=counters.waited_s,
        pushed_bytes=counters.pushed_bytes,
        reply_bytes=counters.reply_bytes,
        queue_depth=training.backends.queue_depth,
        max_queue_depth=counters.max_queue_depth,
    )


def stats_of(training: Training) -> dict[str, Any]:
    """What `Session.stats` returns."""
    backends = training.backends
    counters = backends.counters
    names = [info.name for info in training.infos]
    return {
        "steps": training.completed_before + training.completed,
        "pushes": counters.pushes,
        "pushed_bytes": counters.pushed_bytes,
        "replies": counters.replies,
        "reply_bytes": counters.reply_bytes,
        "queue_depth": backends.queue_depth,
        "max_queue_depth": counters.max_queue_depth,
        **_compression_of(backends),
        **_late_uses_of(training),
        **_counting_of(backends),
        "straggler": backends.straggler,
        "waits": counters.waits,
        "waited_s": counters.waited_s,
        "waited_s_by_parameter": {
            names[index]: seconds for index, seconds in counters.waited_s_by_parameter.items()
        },
    }


def _compression_of(backends: Backends) -> dict[str, int]:
    """What pushes and replies would have had without compression, if there is any."""
    codecs = [own.codecs for own in backends.all if own.codecs is not None]
    if not codecs:
        return {}
    served = (cast("ServedBackend", own) for own in backends.all)
    tables = [own.rows for own in served if getattr(own.engine, "shards", ())]
    return {
        "raw_pushed_bytes": sum(own.raw_pushed_bytes for own in (*codecs, *tables)),
        "raw_reply_bytes": sum(own.raw_reply_bytes for own in (*codecs, *tables)),
    }


def _late_uses_of(training: Training) -> dict[str, int]:
    """How often parameters were used one step late, if they may be."""
    if training.config.staleness != "late":
        return {}
    from foreprop.staleness.lateparameter import LateParameter

    late = [each for each in training.parameters if isinstance(each, LateParameter)]
    return {"late_uses": sum(each.use.count for each in late)}


def _counting_of(backends: Backends) -> dict[str, Any]:
    """Who has left, or came late, where servers may count some workers only."""
    found: dict[str, Any] = {}
    for backend in backends.all:
        members = getattr(backend, "members", None)
        found |= {} if members is None else members.stats()
    return found


# What a trace says of its session.
def begin_trace(training: Training, folder: str, session_id: str) -> TraceRecorder:
    """This rank's."""
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
    """For `TraceRecorder.describe`; sizes are in bytes, as they are sent."""
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
