"""``architecture="hybrid"`` on a simulated cluster: a ring, and servers beside it for tables' rows.

That is Parallax's division of labour (Kim et al., section 5.3.1), as `collectives.hybrid` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreprop.errors import ConfigError
from foreprop.simulate.cluster import Cluster, SimulatedSteps
from foreprop.simulate.collective import Ring
from foreprop.simulate.device import Synchronisation
from foreprop.simulate.presets import (
    SEND_BUFFER_BYTES,
    agree,
    bytes_per_elem,
    simulated_config,
    train_served,
)
from foreprop.simulate.ring import RingWorker, ring_workers
from foreprop.simulate.served import ServedWorker
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.setting import HYBRID


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


class HybridWorker:
    """A rank; see `device.Synchronisation`. ``places``: of dense arrays, those in the ring."""

    def __init__(self, ring: RingWorker, rows: ServedWorker, places: Mapping[int, int]) -> None:
        self._ring = ring
        self._rows = rows
        self._places = places
        self._waits_for_ring = False

    @property
    def look(self) -> Callable[[], None]:
        return self._ring.look

    @look.setter
    def look(self, look: Callable[[], None]) -> None:
        self._ring.look = self._rows.look = look

    @property
    def proceed(self) -> Callable[[], None]:
        return self._ring.proceed

    @proceed.setter
    def proceed(self, proceed: Callable[[], None]) -> None:
        self._ring.proceed = self._rows.proceed = proceed

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
        """The ring plans by what has waited for it."""
        if self._waits_for_ring:
            self._ring.waited(seconds)

    def start_step(self) -> None:
        """Nothing has to be asked for: rows have been."""

    def gradient_ready(self, parameter: int, step: int) -> None:
        place = self._places.get(parameter)
        if place is None:
            self._rows.gradient_ready(parameter, step)
        else:
            self._ring.gradient_ready(place, step)

    def end_step(self, step: int) -> bool:
        self._rows.end_step(step)
        return self._ring.end_step(step)
