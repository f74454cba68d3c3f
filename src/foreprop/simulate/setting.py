"""What one simulation is asked: the lab's settings, and what no lab on one machine can have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from foreprop.config import PRESETS
from foreprop.errors import ConfigError
from foreprop.workload.setting import DDP, DDP_TUNED, RING, LabSetting, option


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
    count = usual if groups is None else groups
    together = 1 if groups is None else max(1, slow_nodes)
    bounds = [usual * group // count for group in range(count + 1)]
    crowds = [Crowd(first=first, members=end - first) for first, end in pairwise(bounds)]
    slow = range(usual, nodes, together)
    return crowds + [Crowd(first=node, members=together, slowdown=slowdown) for node in slow]


SIMULATED_SYSTEMS = (*PRESETS, RING, DDP, DDP_TUNED)
_MOST_WORKERS_EACH = 1024
"""When every node is simulated."""
_USUAL_NODES_EACH = 64
"""More than these are simulated by symmetry unless asked otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetting(LabSetting):
    """What can be simulated: fewer systems than the lab has, on more nodes."""

    latency_s: float = option("One-way latency (half the ping time), as 50us.", 100e-6)
    """Both links on the way together."""
    symmetric: bool | None = option(
        "Let one stand for all that do the same; by default above 64 nodes of one worker.", None
    )
    """See `simulate.device`. Nodes of several workers, which share relays and a link, are each
    simulated."""
    representatives: int = option(
        "How many stand for all, if it is symmetric; 4 are more exact.", 1
    )
    """For the nodes that are not slow."""

    known_systems: ClassVar[tuple[str, ...]] = SIMULATED_SYSTEMS
    hooked_systems: ClassVar[tuple[str, ...]] = ()
    most_nodes: ClassVar[int] = 65_536

    def __post_init__(self) -> None:
        super(SimulatedSetting, self).__post_init__()
        self._check_symmetric()
        self._check_each_is_apart()
        if not 1 <= self.representatives <= self.nodes - self.slow_nodes:
            raise ConfigError(
                f"representatives is {self.representatives}; it must be at least 1 and at most"
                f" {self.nodes - self.slow_nodes}, the nodes that are not slow"
            )
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s is {self.latency_s}; it must be finite and at least 0")

    def _check_each_is_apart(self) -> None:
        if self.staleness and self.is_symmetric:
            raise ConfigError(
                f"staleness is {self.staleness!r}, but a node stands for several of {self.nodes},"
                " which would make their steps together; ask for symmetric=False (--every-node)"
            )

    def _check_symmetric(self) -> None:
        if self.workers_per_node > 1 and self.symmetric:
            raise ConfigError(
                f"symmetric is True, but workers_per_node is {self.workers_per_node}: several"
                " workers per node are simulated node by node only; leave symmetric (--symmetric)"
                " out, or ask for one worker per node"
            )
        for name in ("link_rates", "cross_traffic"):
            if self.symmetric and getattr(self, name):
                raise ConfigError(
                    f"symmetric is True, but {name} makes links differ: these are simulated node by"
                    " node only; leave symmetric (--symmetric) out"
                )
        if self.is_symmetric:
            return
        if self.workers > _MOST_WORKERS_EACH:
            raise ConfigError(self._too_many())
        if self.representatives > 1:
            raise ConfigError(f"representatives is {self.representatives}, but {self._why_each()}")

    def _why_each(self) -> str:
        if self.workers_per_node > 1:
            return "several workers per node are simulated node by node; leave it out"
        if self.link_rates or self.cross_traffic:
            return "nodes whose links differ are simulated node by node; leave it out"
        return f"every one of {self.nodes} nodes is simulated; ask for symmetric=True (--symmetric)"

    def _too_many(self) -> str:
        if self.workers_per_node > 1:
            return (
                f"workers_per_node is {self.workers_per_node} on {self.nodes} nodes; at most"
                f" {_MOST_WORKERS_EACH} workers, as several per node are simulated node by node"
            )
        return (
            f"nodes is {self.nodes}; at most {_MOST_WORKERS_EACH} if each is simulated, which"
            " symmetric=False asks for"
        )

    @property
    def is_symmetric(self) -> bool:
        if self.symmetric is None:
            alike = self.workers_per_node == 1 and not (self.link_rates or self.cross_traffic)
            return alike and self.nodes > _USUAL_NODES_EACH
        return self.symmetric

    @property
    def crowds(self) -> list[Crowd]:
        """Of all nodes, in order; each node by itself if it is not symmetric."""
        each = None if not self.is_symmetric else self.representatives
        return plan_crowds(
            self.nodes, groups=each, slow_nodes=self.slow_nodes, slowdown=self.slowdown
        )
