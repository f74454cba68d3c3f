"""Which slice size suits a model and its links: p3's steps simulated with several sizes.

Large slices hold up others and fill the window of pushes with few, small ones cost hosts more. That
is between the state machines, the window and the network, so it is these that are asked
(docs/simulator.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foreprop.config import Config
from foreprop.core.ratedslices import slice_elems_at
from foreprop.core.slicing import SLICE_ELEMS
from foreprop.simulate.run import simulate_system
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.hosts import Hosts
from foreprop.workload.profile import Layer, Profile

CANDIDATES = tuple(SLICE_ELEMS * 2**power // 16 for power in range(9))
"""Elements: 3,125 to 800,000."""
_MOST_SLICES = 4096
"""Of a model: more cost hosts too much, whatever a simulation says."""
_MOST_NODES_EACH = 4
"""Of more, one worker stands for all, which is quicker and shows the same sizes as best."""
_TOLERANCE = 0.005
"""Steps that differ by less are as good."""
_SLICE_CPU_S = 60e-6
"""What a slice costs a node's worker and server beyond its bytes (`foreprop bench overhead`)."""
_CPU_PRICE = 0.2
"""Seconds of a step that a second of its hosts' CPU is worth, which load data, too."""
_PATIENCE = 2
"""Sizes in one direction that may be no better before it is given up."""
_STEPS, _UNCOUNTED_STEPS = 3, 1


@dataclass(frozen=True, slots=True)
class SliceChoice:
    """The size, and the simulated step of each one that was tried, seconds."""

    slice_elems: int
    step_s: Mapping[int, float]


def choose_slice_elems(
    profile: Profile,
    *,
    compute_s: float,
    nodes: int,
    rate_bits_per_s: float,
    latency_s: float,
    config: Config,
) -> SliceChoice:
    """The best of `CANDIDATES` for a session with this ``config``; deterministic.

    Sizes are tried from 50,000 on, smaller ones first, for as long as steps get shorter. More than
    4 nodes are simulated by symmetry (`simulate.device`).
    """
    setting = SimulatedSetting(
        profile=profile,
        systems=("p3",),
        nodes=nodes,
        scale=1,
        compute_s=compute_s,
        rate_bits_per_s=rate_bits_per_s,
        latency_s=latency_s,
        symmetric=nodes > _MOST_NODES_EACH,
    )
    layers = setting.layers
    sizes = [size for size in CANDIDATES if slices_of(layers, size) <= _MOST_SLICES]
    tried = search(sizes or CANDIDATES[-1:], lambda size: _step_s(setting, config, size))
    cpu_s = {size: slices_of(layers, size) * _SLICE_CPU_S for size in tried}
    elems = sum(size for layer in layers for size in layer.sizes_elems)
    suited = slice_elems_at(rate_bits_per_s, servers=nodes, elems=elems)
    cost_s = {size: step_s + _CPU_PRICE * cpu_s[size] for size, step_s in tried.items()}
    chosen = pick(cost_s, near=suited)
    return SliceChoice(chosen, tried)


def search(sizes: Sequence[int], step_s: Callable[[int], float]) -> dict[int, float]:
    """The steps of those that are worth trying; ``sizes`` ascend."""
    start = min(range(len(sizes)), key=lambda place: abs(sizes[place] - SLICE_ELEMS))
    tried = {sizes[start]: step_s(sizes[start])}
    for way in (reversed(sizes[:start]), sizes[start + 1 :]):
        worse = 0
        for size in way:
            best_s = min(tried.values())
            tried[size] = step_s(size)
            worse = 0 if tried[size] < best_s else worse + 1
            if worse == _PATIENCE:
                break
    return tried


def slices_of(layers: Sequence[Layer], slice_elems: int) -> int:
    return sum(math.ceil(size / slice_elems) for layer in layers for size in layer.sizes_elems)


def pick(cost_s: Mapping[int, float], *, near: int) -> int:
    """Of those that are as good as the best, the nearest to what links of that rate suit.

    For that some things count that are not simulated (`core.ratedslices`).
    """
    enough_s = (1 + _TOLERANCE) * min(cost_s.values())
    good = (size for size, seconds in cost_s.items() if seconds <= enough_s)
    return min(good, key=lambda size: abs(math.log2(size / near)))


def _step_s(setting: SimulatedSetting, config: Config, size: int) -> float:
    changes = as_simulated(config, size)
    steps = simulate_system("p3", setting, Hosts(), steps=_STEPS, **changes)
    return statistics.median(step for node in steps.step_s for step in node[_UNCOUNTED_STEPS:])


def as_simulated(config: Config, slice_elems: int) -> dict[str, Any]:
    """Every setting, so that none comes from the environment."""
    settings = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    return settings | {
        "architecture": "p2p",
        "slice_elems": slice_elems,
        "servers_per_node": 1,
        "workers_per_node": 1,
        "local_aggregation": "auto",
        "link_rate_bits_per_s": None,
        "trace": None,
    }
