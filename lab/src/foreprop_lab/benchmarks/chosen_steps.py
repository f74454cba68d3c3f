"""What ``auto`` chooses by the model, beside what it would choose if each choice were simulated.

python -m foreprop_lab.benchmarks.chosen_steps OUT.json [MODELS [NODES [GBITS]]]

Steps with both choices are simulated. Their ratio is what the model costs; below 1 it has won.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreprop.config import Config
from foreprop.core.linkshares import slice_elems_at
from foreprop.plan.compressing import arrays_in_order, choose_codecs
from foreprop.plan.planner import Candidate, PlanSetting, deployment_of
from foreprop.plan.profile import load_profile, profile_names
from foreprop.plan.refined import CANDIDATES, choose_slice_elems, slices_of
from foreprop.tools.cli.options import writable
from foreprop_lab.setting.codecs import patterns_text
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import rate_for_balance
from foreprop_lab.simulate import compressed
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

MODELS = tuple(profile_names())
NODES = (2, 4, 8, 16)
GBITS = (1.0, 5.0, 25.0)
BALANCES = {"slices": (0.7, 1.5), "codecs": (1.5, 4.0)}
"""How long the links take for a step's bytes, over its compute."""
_LATENCY_S = 50e-6
_MOST_NODES_EACH = 4
"""The most nodes that are each simulated; of more, one stands for all."""
_MOST_SLICES = {"slices": 4096, "codecs": 2048}
_TOLERANCE, _CPU_PRICE, _SLICE_CPU_S, _PATIENCE = 0.005, 0.2, 60e-6, 2
"""Steps that are as good; seconds of a step that one of hosts' CPU is worth; what a slice costs
these; and sizes that may be no better before no more are tried."""
_STEPS, _UNCOUNTED_STEPS = 3, 1
Point = dict[str, Any]


def main(
    path: str,
    models: Sequence[str] = MODELS,
    nodes: Sequence[int] = NODES,
    gbits: Sequence[float] = GBITS,
) -> list[Point]:
    """Write the points to ``path``, each when it is known, and return them all."""
    writable(Path(path).parent)
    points: list[Point] = []
    for model in models:
        for count in nodes:
            for gbit in gbits:
                for what, balances in BALANCES.items():
                    points += [compare(what, model, count, gbit, each) for each in balances]
                    Path(path).write_text(json.dumps(points, indent=1) + "\n")
    print(describe(points))
    return points


def compare(what: str, model: str, nodes: int, gbit: float, balance: float) -> Point:
    """A point with both choices of ``what``: ``slices`` or ``codecs``."""
    profile = load_profile(model)
    rate = gbit * 1e9
    # the rate at which a step of one second has that balance, over the asked one
    layers = profile.layers(scale=1, compute_s=1.0)
    compute_s = rate_for_balance(layers, nodes=nodes, balance=balance) / rate
    about: dict[str, Any] = {"profile": profile, "nodes": nodes, "compute_s": compute_s}
    about |= {"rate_bits_per_s": rate, "latency_s": _LATENCY_S}
    simulated = SimulatedSetting(
        **about, systems=("p3",), scale=1, symmetric=nodes > _MOST_NODES_EACH
    )
    compared = {"slices": compare_slices, "codecs": compare_codecs}[what]
    point = compared(PlanSetting(**about), simulated)
    named = {"what": what, "model": model, "nodes": nodes, "gbit": gbit, "balance": balance}
    return named | point | {"ratio": point["modelled_s"] / point["simulated_s"]}


def compare_slices(setting: PlanSetting, simulated: SimulatedSetting) -> Point:
    config = Config(slice_elems="auto")
    modelled = choose_slice_elems(deployment_of(setting, Candidate("p2p", "p3"), config))
    tried = simulated_sizes(simulated)
    if modelled not in tried:
        tried[modelled] = simulated_s(simulated, modelled)
    chosen = simulated_choice(simulated, tried)
    return {
        "modelled": modelled,
        "simulated": chosen,
        "modelled_s": tried[modelled],
        "simulated_s": tried[chosen],
    }


def simulated_sizes(simulated: SimulatedSetting) -> dict[int, float]:
    """Steps by size: from the usual one on, for as long as they get shorter."""
    most = _MOST_SLICES["slices"]
    sizes = [size for size in CANDIDATES if slices_of(simulated.layers, size) <= most]
    start = min(range(len(sizes)), key=lambda place: abs(sizes[place] - 50_000))
    tried = {sizes[start]: simulated_s(simulated, sizes[start])}
    for way in (sizes[:start][::-1], sizes[start + 1 :]):
        worse = 0
        for size in way:
            best_s = min(tried.values())
            tried[size] = simulated_s(simulated, size)
            worse = 0 if tried[size] < best_s else worse + 1
            if worse == _PATIENCE:
                break
    return tried


def simulated_choice(simulated: SimulatedSetting, tried: Mapping[int, float]) -> int:
    """The size nearest to what suits the rate, of those as good, hosts' CPU counted."""
    layers = simulated.layers
    elems = sum(size for layer in layers for size in layer.sizes_elems)
    near = slice_elems_at(simulated.rate, servers=simulated.nodes, elems=elems)
    cost_s = {
        size: step_s + _CPU_PRICE * _SLICE_CPU_S * slices_of(layers, size)
        for size, step_s in tried.items()
    }
    enough_s = (1 + _TOLERANCE) * min(cost_s.values())
    good = (size for size, seconds in cost_s.items() if seconds <= enough_s)
    return min(good, key=lambda size: abs(math.log2(size / near)))


def compare_codecs(setting: PlanSetting, simulated: SimulatedSetting) -> Point:
    config = Config(compression="auto")
    slice_elems = config.cut_elems(setting.nodes)
    modelled = choose_codecs(setting, deployment_of(setting, Candidate("p2p", "p3"), config))
    while slices_of(simulated.layers, slice_elems) > _MOST_SLICES["codecs"]:
        slice_elems *= 2
    changes: Point = {"slice_elems": slice_elems}
    asked = replace(simulated, slice_elems=config.cut_elems(setting.nodes))
    chosen = compressed.choose_codecs(asked, **changes).enough
    names = [array.name for array in arrays_in_order(setting.profile)]
    point: Point = {}
    for name, enough in (("modelled", modelled), ("simulated", chosen)):
        text = patterns_text(names, enough.codecs)
        coded = replace(simulated, compression=text or None)
        point[name] = enough.sentence
        point[f"{name}_loss"] = enough.loss
        point[f"{name}_s"] = simulated_s(coded, config.cut_elems(setting.nodes))
    return point


def simulated_s(simulated: SimulatedSetting, slice_elems: int) -> float:
    steps = simulate_system("p3", simulated, Hosts(), steps=_STEPS, slice_elems=slice_elems)
    return statistics.median(step for node in steps.step_s for step in node[_UNCOUNTED_STEPS:])


def describe(points: Sequence[Point]) -> str:
    lines = []
    for what in BALANCES:
        ratios = sorted(point["ratio"] for point in points if point["what"] == what)
        if ratios:
            over = sum(ratio > 1.02 for ratio in ratios)
            lines.append(
                f"{what}: {len(ratios)} points, ratio {ratios[0]:.3f} to {ratios[-1]:.3f},"
                f" {statistics.median(ratios):.3f} in the median, {over} above 1.02"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    given = zip((str, int, float), sys.argv[2:], strict=False)
    main(sys.argv[1], *([read(part) for part in text.split(",")] for read, text in given))
