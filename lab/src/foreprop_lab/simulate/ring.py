"""``architecture="ring"`` on a simulated cluster: the ring machine and planned orders.

``architecture="hybrid"`` has a ring, and servers beside it for tables' rows: Parallax's division of
labour (Kim et al., section 5.3.1), as `backends.hybrid` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from foreprop.config import Config
from foreprop.core.frames import CompleteParameter, GradientReady
from foreprop.core.norm import ZERO
from foreprop.errors import ConfigError, InternalError
from foreprop.features.collectives.order import Observer, better_order, cut_chunks, plans_after
from foreprop.features.collectives.ring_machine import (
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
from foreprop_lab.setting.labsetting import HYBRID, RING
from foreprop_lab.simulate.cluster import Cluster, SimulatedSteps
from foreprop_lab.simulate.collective import Ring
from foreprop_lab.simulate.device import Synchronisation
from foreprop_lab.simulate.presets import (
    SEND_BUFFER_BYTES,
    agree,
    bytes_per_elem,
    simulated_config,
    train_served,
)
from foreprop_lab.simulate.served import ServedWorker
from foreprop_lab.simulate.setting import SimulatedSetting

_GRADIENTS = "float32"
"""All gradients are of one kind."""
_FIRST_OBSERVED = 2  # as in a session: in the first step gradients are pushed all at once


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
    ranks: list[RingWorker] = []
    for rank in cluster.ranks:
        ranks.append(RingWorker(cluster, ring, rank, sizes_elems, config=config, ranks=ranks))
    return ranks


class RingWorker(Synchronisation):
    """One of the ring's ``ranks``."""

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

    def is_complete(self, parameter: int) -> bool:
        return self._machine.is_complete(parameter)

    def needed(self, parameter: int) -> None:
        step = self._machine.step_of(parameter)
        if step >= _FIRST_OBSERVED:
            self.observer.needed(parameter, step, self._clock.now_s)

    def waited(self, seconds: float) -> None:
        self.observer.waited(seconds)

    def gradient_ready(self, parameter: int, step: int) -> None:
        if step >= _FIRST_OBSERVED:
            self.observer.gradient_ready(parameter, step, self._clock.now_s)
        self._handle(GradientReady(parameter, step))

    def end_step(self, step: int) -> bool:
        """Wait, after some steps, with all ranks for the order of those to come."""
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
        """On rank 0, a better order, if there is one (see `collectives.engine`)."""
        observed = self.observer.observation(others_ready_s)
        self.observer.forget_rate()
        forward_order = range(len(self._sizes_elems))
        return better_order(self._order, self._chunks, forward_order, observed)

    def learn(self, order: tuple[int, ...] | None, step: int) -> None:
        """Have chunks go in this order from ``step`` on; None changes nothing."""
        if order is not None:
            self._order = order
            self._handle(OrderLearned(order, step))

    def _handle(self, event: Any) -> None:
        completed = False
        for instruction in self._machine.handle(event):
            if type(instruction) is ReduceChunk:
                number, step = instruction
                self._under_way += 1
                reduced = partial(self._reduced, number)
                self._ring.issue(self._rank, (number, step), self._chunks[number].elems, reduced)
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

    def _reduced(self, number: int) -> None:
        self._under_way -= 1
        self.observer.reduced(number, self._clock.now_s, more=self._under_way > 0)
        self._handle(ChunkReduced(number))


def simulate_hybrid(
    setting: SimulatedSetting, cluster: Cluster, *, steps: int, **changes: Any
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass; ``changes`` are fields of `Config`."""
    config = simulated_config(HYBRID, setting, **({"architecture": HYBRID} | changes))
    if config.aggregation.needs_norm:
        raise ConfigError(
            "systems has 'hybrid', and the environment asks for clipping by the norm: a norm that"
            " a ring and servers add up is not simulated; unset FOREPROP_CLIP_GRAD_NORM"
        )
    agreement = agree(config, setting)
    sizes_elems = [size for layer in setting.layers for size in layer.sizes_elems]
    dense = [number for number in range(len(sizes_elems)) if number not in setting.table_arrays]
    ring = Ring(
        cluster,
        buffer_bytes=setting.scaled(SEND_BUFFER_BYTES),
        bytes_per_elem=bytes_per_elem(config),
        beside=2 * (cluster.nodes - 1) * agreement.workers // cluster.nodes,
    )
    reduced = ring_workers(cluster, ring, [sizes_elems[number] for number in dense], config)
    places = {number: place for place, number in enumerate(dense)}

    def both(served: Sequence[ServedWorker]) -> Sequence[Synchronisation]:
        pairs = zip(reduced, served, strict=True)
        return [HybridWorker(ring, rows, places) for ring, rows in pairs]

    return train_served(
        config, agreement, setting, cluster, steps=steps, beside=1, synchronised=both
    )


class HybridWorker(Synchronisation):
    """A rank; ``places`` are the dense arrays' numbers in the ring."""

    def __init__(self, ring: RingWorker, rows: ServedWorker, places: Mapping[int, int]) -> None:
        self._ring = ring
        self._rows = rows
        self._places = places
        self._waits_for_ring = False

    def attach(self, look: Callable[[], None], proceed: Callable[[], None]) -> None:
        self._ring.attach(look, proceed)
        self._rows.attach(look, proceed)

    def is_complete(self, parameter: int) -> bool:
        place = self._places.get(parameter)
        if place is None:
            return self._rows.is_complete(parameter)
        return self._ring.is_complete(place)

    def needed(self, parameter: int) -> None:
        place = self._places.get(parameter)
        self._waits_for_ring = place is not None
        if place is not None:
            self._ring.needed(place)

    def waited(self, seconds: float) -> None:
        if self._waits_for_ring:
            self._ring.waited(seconds)

    def gradient_ready(self, parameter: int, step: int) -> None:
        place = self._places.get(parameter)
        if place is None:
            self._rows.gradient_ready(parameter, step)
        else:
            self._ring.gradient_ready(place, step)

    def end_step(self, step: int) -> bool:
        self._rows.end_step(step)
        return self._ring.end_step(step)
