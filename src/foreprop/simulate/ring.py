"""``architecture="ring"`` on a simulated cluster: the core's ring machine and planned orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foreprop.config import Config
from foreprop.core.frames import CompleteParameter, GradientReady
from foreprop.core.norm import ZERO
from foreprop.core.order import Observer, better_order, cut_chunks, plans_after
from foreprop.core.ring_machine import (
    ChunkReduced,
    MeasureParameter,
    OrderLearned,
    ParameterMeasured,
    ParameterUpdated,
    ReduceChunk,
    RingMachine,
    UpdateParameter,
    UseNorm,
    most_collectives,
)
from foreprop.errors import InternalError
from foreprop.simulate.cluster import Cluster, SimulatedSteps
from foreprop.simulate.collective import Ring
from foreprop.simulate.device import no_device
from foreprop.simulate.presets import SEND_BUFFER_BYTES, bytes_per_elem, simulated_config
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.setting import RING

_GRADIENTS = "float32"
"""The kind of them all."""
_FIRST_OBSERVED = 2  # as engine.ring: in the first step gradients are pushed all at once


def simulate_ring(
    setting: SimulatedSetting, cluster: Cluster, *, steps: int, **changes: Any
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass; orders are planned as in a session.

    ``changes`` are fields of `Config`.
    """
    config = simulated_config(RING, setting, **changes)
    sizes_elems = [size for layer in setting.layers for size in layer.sizes_elems]
    buffer_bytes = setting.scaled(SEND_BUFFER_BYTES)
    ring = Ring(cluster, buffer_bytes=buffer_bytes, bytes_per_elem=bytes_per_elem(config))
    return cluster.train(setting, ring_workers(cluster, ring, sizes_elems, config), steps=steps)


def ring_workers(
    cluster: Cluster, ring: Ring, sizes_elems: Sequence[int], config: Config
) -> list[RingWorker]:
    """A worker for each rank, of arrays of such sizes."""
    ranks: list[RingWorker] = []
    for rank in cluster.ranks:
        ranks.append(RingWorker(cluster, ring, rank, sizes_elems, config=config, ranks=ranks))
    return ranks


class RingWorker:
    """A rank; see `device.Synchronisation`. ``ranks``: all of the ring."""

    def __init__(
        self,
        cluster: Cluster,
        ring: Ring,
        rank: int,
        sizes_elems: Sequence[int],
        *,
        config: Config,
        ranks: Sequence[RingWorker],
    ) -> None:
        self.look: Callable[[], None] = no_device
        self.proceed: Callable[[], None] = no_device
        self.ended_step = 0
        self._clock, self._hosts = cluster.clock, cluster.hosts
        self._ring = ring
        self._rank = rank
        self._sizes_elems = sizes_elems
        self._ranks = ranks
        self._chunks = cut_chunks(
            sizes_elems, config.chunk_elems, kinds=[_GRADIENTS] * len(sizes_elems)
        )
        self._order: tuple[int, ...] | None = None
        self._under_way = 0
        self._machine = RingMachine(
            self._chunks,
            parameters=len(sizes_elems),
            in_flight=most_collectives(config.chunks_in_flight),
            in_flight_elems=config.chunks_in_flight * config.chunk_elems,
            needs_norm=config.aggregation.needs_norm,
        )
        sizes_bytes = [bytes_per_elem(config) * chunk.elems for chunk in self._chunks]
        self.observer = Observer(len(sizes_elems), sizes_bytes)

    # For the device.
    def is_complete(self, parameter: int) -> bool:
        return self._machine.is_complete(parameter)

    def needed(self, parameter: int) -> None:
        step = self._machine.step_of(parameter)
        if step >= _FIRST_OBSERVED:
            self.observer.needed(parameter, step, self._clock.now_s)

    def waited(self, seconds: float) -> None:
        self.observer.waited(seconds)

    def start_step(self) -> None:
        """Nothing has to be asked for."""

    def gradient_ready(self, parameter: int, step: int) -> None:
        if step >= _FIRST_OBSERVED:
            self.observer.gradient_ready(parameter, step, self._clock.now_s)
        self._handle(GradientReady(parameter, step))

    def end_step(self, step: int) -> bool:
        """After some steps all ranks wait for the order of those to come."""
        self.ended_step = step
        if not plans_after(step):
            return True
        if all(rank.ended_step == step for rank in self._ranks):
            self._clock.at(self._clock.now_s, self._publish_order, step)
        return False

    def _publish_order(self, step: int) -> None:
        first = self._ranks[0]
        order = first.plan([rank.observer.ready_s() for rank in self._ranks[1:]])
        for rank in self._ranks:
            rank.learn(order, step + 1)
            rank.proceed()

    def plan(self, others_ready_s: Sequence[Sequence[float]]) -> tuple[int, ...] | None:
        """Rank 0: a better order, if there is one (see `collectives.engine`)."""
        observed = self.observer.observation(others_ready_s)
        self.observer.forget_rate()
        forward_order = range(len(self._sizes_elems))
        return better_order(self._order, self._chunks, forward_order, observed)

    def learn(self, order: tuple[int, ...] | None, step: int) -> None:
        """From ``step`` on chunks go in this order; None: as before."""
        if order is not None:
            self._order = order
            self._handle(OrderLearned(order, step))

    def _handle(self, event: Any) -> None:
        completed = False
        for instruction in self._machine.handle(event):
            if type(instruction) is ReduceChunk:
                self._reduce(*instruction)
            elif type(instruction) is UpdateParameter:
                elems = self._sizes_elems[instruction.parameter]
                at_s = self._clock.now_s + self._hosts.updating_s(elems, 1)
                self._clock.at(at_s, self._handle, ParameterUpdated(instruction.parameter))
            elif type(instruction) is MeasureParameter:
                elems = self._sizes_elems[instruction.parameter]
                at_s = self._clock.now_s + self._hosts.measuring_s(elems, 0)
                self._clock.at(at_s, self._handle, ParameterMeasured(instruction.parameter, ZERO))
            elif type(instruction) is CompleteParameter:
                completed = True
            elif type(instruction) is UseNorm:
                pass  # clipping is part of an update
            else:
                raise InternalError(f"a simulated rank cannot do {instruction!r}")
        if completed:
            self.look()

    def _reduce(self, number: int, step: int) -> None:
        chunk = self._chunks[number]
        self._under_way += 1
        self._ring.issue(self._rank, (number, step), chunk.elems, lambda: self._reduced(number))

    def _reduced(self, number: int) -> None:
        self._under_way -= 1
        self.observer.reduced(number, self._clock.now_s, more=self._under_way > 0)
        self._handle(ChunkReduced(number))
