"""Nodes that do the same, so that one of them stands for all: crowds, and their devices.

Theory of operation. What a crowd's worker is told happens to all its members at once; what it does
has been done when the last of them has done it. That is what the others wait for: a slice is
updated, and a collective begins, when the last worker is ready. The members' computing times are
kept apart, each with draws of its own, so that a step has the slowest of all members, not that of
one in the middle (`CrowdDevice`). A crowd of one is just a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreprop.simulate.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The nodes ``first`` to ``first + members - 1``."""

    first: int
    members: int
    slowdown: float = 0.0
    """By what share their compute takes longer than a profile says."""

    @property
    def nodes(self) -> range:
        return range(self.first, self.first + self.members)


def plan_crowds(
    nodes: int, *, groups: int | None, slow_nodes: int = 0, slowdown: float = 0.0
) -> list[Crowd]:
    """The usual nodes in ``groups`` of about one size, then the slow ones in one.

    None: every node by itself.
    """
    usual = nodes - slow_nodes
    if groups is None:
        alone = [Crowd(first=node, members=1) for node in range(usual)]
        slow = range(usual, nodes)
        return alone + [Crowd(first=node, members=1, slowdown=slowdown) for node in slow]
    crowds = list(_groups(usual, groups))
    if slow_nodes:
        crowds.append(Crowd(first=usual, members=slow_nodes, slowdown=slowdown))
    return crowds


def _groups(nodes: int, groups: int) -> Iterator[Crowd]:
    for group in range(groups):
        first, end = nodes * group // groups, nodes * (group + 1) // groups
        yield Crowd(first=first, members=end - first)


class CrowdDevice(Device):
    """The devices of a crowd's members, whose times are drawn for each of them apart.

    A member's forward pass goes on when its layer's arrays are there and it has done the layer
    before; a gradient is ready when the last member has it. Times of steps are the members' means.
    """

    def __init__(self, *args: Any, members: int, seed: int = 0, **named: Any) -> None:
        super().__init__(*args, seed=seed, **named)
        self._draws = np.random.default_rng(seed)
        self._ends_s: NDArray[np.float64] = np.zeros(members)  # of what each member does now
        self._factors: NDArray[np.float64] = np.ones(members)
        self._there_s = [0.0] * sum(map(len, self._parameters))  # by array: since when
        self._awaited: set[int] = set()

    def _look(self) -> None:
        self._note_complete(self._clock.now_s)
        super()._look()

    def _compute(self, seconds: float) -> float:
        """When the last member has done it."""
        factors = self._factors
        if self._jitter:
            factors = factors * (1 + self._jitter * self._draws.uniform(-1, 1, len(factors)))
        self._ends_s = self._ends_s + seconds * factors
        return max(float(self._ends_s.max()), self._clock.now_s)

    def _start_layer(self) -> None:
        arrays = self._parameters[self._layer]
        self._wait_until(max((self._there_s[array] for array in arrays), default=0.0))
        super()._start_layer()

    def _wait_until(self, time_s: float) -> None:
        starts_s = np.maximum(self._ends_s, time_s)
        self._idle_s += float((starts_s - self._ends_s).mean())
        self._ends_s = starts_s

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            self._synchronisation.waited(self._clock.now_s - self._blocked_s)

    def _proceed(self) -> None:
        self._wait_until(self._clock.now_s)
        self._begin_forward()

    def _push(self, parameter: int) -> None:
        super()._push(parameter)
        self._awaited.add(parameter)

    def _begin_forward(self) -> None:
        self._note_complete(0.0)  # at once, as DDP's arrays are: nobody has been told of these
        super()._begin_forward()

    def _note_complete(self, since_s: float) -> None:
        for parameter in [p for p in self._awaited if self._synchronisation.is_complete(p)]:
            self._awaited.remove(parameter)
            self._there_s[parameter] = since_s

    def _draw_step(self) -> None:
        if self._step_jitter:
            normal = self._draws.standard_normal(len(self._factors))
            self._factors = np.exp(self._step_jitter * normal)

    def _now_s(self) -> float:
        return float(self._ends_s.mean())
