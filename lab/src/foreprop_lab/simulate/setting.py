"""The setting of a simulation: the lab's, and what no lab on one machine can have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from foreprop.config import PRESETS
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.profile import Layer, ProfiledArray
from foreprop.quantities import option
from foreprop_lab.setting.labsetting import (
    DDP,
    DDP_SPARSE,
    DDP_TUNED,
    HYBRID,
    RING,
    LabSetting,
    base_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The nodes ``first`` to ``first + members - 1``, which do the same."""

    first: int
    members: int
    slowdown: float = 0.0
    """The share by which their compute takes longer than a profile says."""

    @property
    def nodes(self) -> range:
        return range(self.first, self.first + self.members)


def plan_crowds(
    nodes: int, *, groups: int | None, slow_nodes: int = 0, slowdown: float = 0.0
) -> list[Crowd]:
    """The usual nodes in ``groups`` of about one size, then the slow ones in one.

    If ``groups`` is None, every node is a crowd by itself.
    """
    usual = nodes - slow_nodes
    count = usual if groups is None else groups
    together = 1 if groups is None else max(1, slow_nodes)
    bounds = [usual * group // count for group in range(count + 1)]
    crowds = [Crowd(first=first, members=end - first) for first, end in pairwise(bounds)]
    slow = range(usual, nodes, together)
    return crowds + [Crowd(first=node, members=together, slowdown=slowdown) for node in slow]


SIMULATED_SYSTEMS = (*PRESETS, RING, HYBRID, DDP, DDP_TUNED, DDP_SPARSE)
_BY_ROWS = (*PRESETS, HYBRID, DDP_SPARSE)
"""The systems that can move touched rows only."""
_MOST_WORKERS_EACH = 1024
"""The most workers if every node is simulated."""
_USUAL_NODES_EACH = 64
"""More nodes than these are simulated by symmetry unless asked otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetting(LabSetting):
    """The setting of a simulation: fewer systems than the lab has, on more nodes."""

    latency_s: float = option("One-way latency (half the ping time), as 50us.", 100e-6)
    """The latency of both links on the way together."""
    symmetric: bool | None = option(
        "Let one stand for all that do the same; by default above 64 nodes of one worker.", None
    )
    """Nodes of several workers share relays and a link, so each is simulated: `simulate.device`."""
    representatives: int = option(
        "How many stand for all, if it is symmetric; 4 are more exact.", 1
    )
    """They stand for the nodes that are not slow."""
    rows: bool = option(
        "Arrays of which the profile says alpha are tables: touched rows move, not all.", False
    )
    """Tables are reduced whole by ``ring``, ``ddp`` and ``ddp-tuned``. The rate that follows from
    ``balance`` is that of whole arrays."""
    together: tuple[tuple[str, float], ...] = ()
    """Names of tables, and the share of rows that a node's workers touch together, if counted."""
    dedicated_servers: int = option(
        "Servers on nodes of their own, for presets, instead of one beside each node's workers.", 0
    )
    """``balance`` and the limit's bytes are then those of the busiest link."""
    server_s_per_gb: float = option(
        "What each GB that a server receives or sends takes its processor, s.", 0.0
    )
    """One processor for each server (`Hosts.server_byte_s`)."""

    known_systems: ClassVar[tuple[str, ...]] = SIMULATED_SYSTEMS
    hooked_systems: ClassVar[tuple[str, ...]] = ()
    most_nodes: ClassVar[int] = 65_536

    def __post_init__(self) -> None:
        super(SimulatedSetting, self).__post_init__()
        self._check_symmetric()
        if self.staleness and self.is_symmetric:
            raise ConfigError(
                f"staleness is {self.staleness!r}, but a node stands for several of {self.nodes},"
                " which would make their steps together; ask for symmetric=False (--every-node)"
            )
        self._check_tables()
        self._check_servers()
        if not 1 <= self.representatives <= self.nodes - self.slow_nodes:
            raise ConfigError(
                f"representatives is {self.representatives}; it must be at least 1 and at most"
                f" {self.nodes - self.slow_nodes}, the nodes that are not slow"
            )
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s is {self.latency_s}; it must be finite and at least 0")

    def _check_tables(self) -> None:
        if not self.rows:
            return
        name = self.profile.name
        if not self.table_arrays:
            raise ConfigError(
                f"rows is True, but the profile {name} has no alpha: profile the model with"
                " sparse=True, or write the share of touched rows to the file's arrays"
            )
        if self.compression is not None:
            raise ConfigError(
                f"rows is True, but compression is {self.compression!r}: codecs of rows are not"
                " simulated; leave one of them out"
            )
        if self.is_symmetric:
            raise ConfigError(
                f"rows is True, but a node stands for several of {self.nodes}: tables are simulated"
                " node by node only; ask for symmetric=False (--every-node)"
            )
        if self.staleness:
            raise ConfigError(
                f"rows is True, but staleness is {self.staleness!r}: simulated servers of rows wait"
                " for every worker; leave one of them out"
            )

    def _check_servers(self) -> None:
        if self.dedicated_servers < 0:
            raise ConfigError(f"dedicated_servers is {self.dedicated_servers}; at least 0")
        if not 0 <= self.server_s_per_gb < math.inf:
            raise ConfigError(
                f"server_s_per_gb is {self.server_s_per_gb}; it must be finite and at least 0"
            )
        if not self.dedicated_servers:
            return
        others = [name for name in self.systems if base_of(name) not in PRESETS]
        if others:
            raise ConfigError(
                f"dedicated_servers is {self.dedicated_servers}, but systems has {others[0]!r},"
                " which has none on nodes of their own: name presets only"
            )
        if self.is_symmetric:
            raise ConfigError(
                f"dedicated_servers is {self.dedicated_servers}, but a node stands for several of"
                f" {self.nodes}; ask for symmetric=False (--every-node)"
            )

    @property
    def table_arrays(self) -> dict[int, ProfiledArray]:
        """Arrays that are held row by row, by their number in forward order."""
        if not self.rows:
            return {}
        arrays = [array for layer in self.profile.arrays_by_layer() for array in layer]
        return {n: array for n, array in enumerate(arrays) if array.alpha is not None}

    def limit_of(self, layers: Sequence[Layer]) -> float:
        """The limit; with dedicated servers that of the busiest link, a worker's or a server's."""
        servers = self.dedicated_servers
        if not servers:
            return super(SimulatedSetting, self).limit_of(layers)
        passes = max(1.0, self.workers / servers, self.workers_per_node)
        rate = self.rate * 2 * (self.nodes - 1) / self.nodes / passes
        return limit.limit_s(layers, nodes=self.nodes, rate_bits_per_s=rate)

    @property
    def beyond(self) -> dict[str, Any]:
        """The fields that no lab has and that are set, as records keep them."""
        names = ("rows", "together", "dedicated_servers", "server_s_per_gb")
        return {name: value for name in names if (value := getattr(self, name))}

    def limit_by(self, system: str) -> float:
        """The limit for a system: of a table touched rows count, if the system moves only those."""
        if not self.rows or base_of(system) not in _BY_ROWS:
            return self.limit_s
        touched = self.profile.layers(
            scale=self.scale,
            compute_s=self.compute_s,
            counted=lambda array: 1.0 if array.alpha is None else array.alpha,
        )
        return self.limit_of(touched)

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
        if self.workers > _MOST_WORKERS_EACH and self.workers_per_node > 1:
            raise ConfigError(
                f"workers_per_node is {self.workers_per_node} on {self.nodes} nodes; at most"
                f" {_MOST_WORKERS_EACH} workers, as several per node are simulated node by node"
            )
        if self.workers > _MOST_WORKERS_EACH:
            raise ConfigError(
                f"nodes is {self.nodes}; at most {_MOST_WORKERS_EACH} if each is simulated, which"
                " symmetric=False asks for"
            )
        if self.representatives > 1:
            why = f"every one of {self.nodes} nodes is simulated; ask for symmetric=True"
            why += " (--symmetric)"
            if self.workers_per_node > 1:
                why = "several workers per node are simulated node by node; leave it out"
            elif self.link_rates or self.cross_traffic:
                why = "nodes whose links differ are simulated node by node; leave it out"
            raise ConfigError(f"representatives is {self.representatives}, but {why}")

    @property
    def is_symmetric(self) -> bool:
        if self.symmetric is None:
            alike = self.workers_per_node == 1 and not (self.link_rates or self.cross_traffic)
            return alike and self.nodes > _USUAL_NODES_EACH
        return self.symmetric

    @property
    def crowds(self) -> list[Crowd]:
        """All nodes, in order; each node is by itself if it is not symmetric."""
        each = None if not self.is_symmetric else self.representatives
        return plan_crowds(
            self.nodes, groups=each, slow_nodes=self.slow_nodes, slowdown=self.slowdown
        )
