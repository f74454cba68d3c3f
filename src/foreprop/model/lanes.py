"""Connections that share links fairly, as a fluid: how fast each one is, and what ends first.

A *lane* is a class of connections that do the same at the same time, as those of all workers to
one server do. Each link gives its connections equal rates, and what one cannot use, because
another link holds it up, to the others (max-min fairness): TCP's in the long run.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_BYTES = 1e-3
"""What is left of a message that has ended, by rounding."""


def fair_rates(
    capacities_bytes_per_s: NDArray[np.float64],
    connections: NDArray[np.float64],
    active: NDArray[np.bool_],
    most_bytes_per_s: float,
) -> NDArray[np.float64]:
    """Of one connection of each active lane, in bytes/s; of the others 0.

    ``connections`` (links, lanes): how many of the lane's pass the link. None gets more than
    ``most_bytes_per_s``, not even where no link holds it up.
    """
    rates = np.zeros(len(active))
    growing = active.copy()
    left = capacities_bytes_per_s.astype(np.float64)
    while growing.any():
        load = connections[:, growing].sum(axis=1)
        used = load > 0
        room = float((left[used] / load[used]).min()) if used.any() else math.inf
        rates[growing] += room
        left -= np.where(used, room, 0.0) * load
        full = used & (left <= 1e-9 * capacities_bytes_per_s)
        growing &= ~(connections[full] > 0).any(axis=0)
        if math.isinf(room):
            break
    return np.minimum(rates, most_bytes_per_s)


class Lanes:
    """Messages in lanes, one at a time in each, and things that happen at fixed times.

    A lane's messages go in the order of their keys, smaller first, and are not interrupted.
    """

    def __init__(
        self,
        capacities_bytes_per_s: Sequence[float],
        connections: NDArray[np.float64],
        *,
        most_bytes_per_s: float,
    ) -> None:
        lanes = connections.shape[1]
        self.now_s = 0.0
        self._capacities = np.asarray(capacities_bytes_per_s, dtype=np.float64)
        self._connections = connections
        self._most = most_bytes_per_s
        self._left_bytes = np.full(lanes, np.inf)
        self._waiting: list[list[tuple[tuple[int, ...], int, float, Callable[[], None]]]]
        self._waiting = [[] for _ in range(lanes)]
        self._ended: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._known: dict[bytes, NDArray[np.float64]] = {}

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happen))

    def send(
        self, lane: int, key: tuple[int, ...], size_bytes: float, ended: Callable[[], None]
    ) -> None:
        """``size_bytes`` on each of the lane's connections; ``ended`` when the last has left."""
        heapq.heappush(self._waiting[lane], (key, next(self._numbers), size_bytes, ended))
        if math.isinf(self._left_bytes[lane]):
            self._begin(lane)

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            active = np.isfinite(self._left_bytes)
            busy = bool(active.any())
            if not busy and not self._events:
                return
            rates = self._rates(active) if busy else np.ones(len(active))
            ends_s = self.now_s + float((self._left_bytes / rates).min())
            if self._events and self._events[0][0] < ends_s:
                due_s, _, happen = heapq.heappop(self._events)
                self._flow(rates, active, due_s)
                happen()
            else:
                self._flow(rates, active, ends_s)
                self._end()

    def _flow(self, rates: NDArray[np.float64], active: NDArray[np.bool_], until_s: float) -> None:
        if until_s > self.now_s:
            self._left_bytes[active] -= rates[active] * (until_s - self.now_s)
            self.now_s = until_s

    def _end(self) -> None:
        ready = np.flatnonzero(self._left_bytes <= _LEAST_BYTES)
        for lane in map(int, ready if len(ready) else [self._left_bytes.argmin()]):
            ended = self._ended.pop(lane)
            self._left_bytes[lane] = np.inf
            if self._waiting[lane]:
                self._begin(lane)
            ended()

    def _begin(self, lane: int) -> None:
        _, _, size_bytes, self._ended[lane] = heapq.heappop(self._waiting[lane])
        self._left_bytes[lane] = size_bytes

    def _rates(self, active: NDArray[np.bool_]) -> NDArray[np.float64]:
        """With 1 for lanes that are idle, whose bytes left are infinite."""
        key = active.tobytes()
        rates = self._known.get(key)
        if rates is None:
            shares = fair_rates(self._capacities, self._connections, active, self._most)
            rates = self._known[key] = np.where(active, shares, 1.0)
        return rates
