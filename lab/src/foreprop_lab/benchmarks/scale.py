"""P3 at 4 to 4096 nodes, simulated by symmetry: the data of lab/docs/scale.md.

python -m foreprop_lab.benchmarks.scale lab/docs/results/scale  # for hours; goes on where it was
python -m foreprop_lab.benchmarks.scale lab/docs/results/scale --draw  # its pictures
"""

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foreprop.core.slicing import SLICE_ELEMS
from foreprop.plan.profile import load_profile
from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import INK, save, style_of
from foreprop.tools.report.document import LIGHT_RAMP, ramp_colour
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import DISCARDED_STEPS, RING_STEPS
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

NODES = (4, 16, 64, 256, 1024, 4096)
RATES_BITS_PER_S = (1e9, 5e9, 10e9, 25e9, 100e9)
MODELS = ("resnet50", "vgg19")
FEW_NODES = 256
"""Up to so many nodes four workers stand for all of p3 and slicing, above that one does."""
COMPUTE_S = 0.25
LATENCY_S = 50e-6
HOSTS = Hosts(worker_frame_s=8e-6, server_frame_s=18e-6)
"""Halves of what `foreprop bench overhead` measures for a slice, pushed and answered."""
SLICES_PER_SERVER = 16
LEAST_SLICE_ELEMS = 6_250
"""p3-fine has so many slices for each server, but none smaller than this."""
CHUNK_ELEMS = 400_000
CHUNKS_ELEMS = {16: (400_000, 1_600_000), 64: (1_600_000, 6_400_000), 4096: (6_400_000, 25_600_000)}
"""The sizes of chunks, of which the best is taken, by the largest number of nodes they are for."""
BUCKETS_BYTES = tuple(n * 2**20 for n in (1, 5, 25, 100, 1000))
SYSTEMS = ("ddp", "ddp-tuned", "ring", "ring-tuned", "slicing", "p3", "p3-fine")
LABELS = {
    "ddp": "ddp (25 MB buckets)",
    "ddp-tuned": "ddp, best buckets",
    "ring": "ring (400,000 per chunk)",
    "ring-tuned": "ring, best chunks",
    "slicing": "slicing (50,000 per slice)",
    "p3": "p3 (50,000 per slice)",
    "p3-fine": "p3, finer slices",
}
Point = dict[str, Any]
DISTURBANCES: dict[str, Point] = {
    "none": {},
    "one node 10 % slower": {"slow_nodes": 1, "slowdown": 0.1},
    "one node 50 % slower": {"slow_nodes": 1, "slowdown": 0.5},
    "steps vary by 10 %": {"step_jitter": 0.1},
    "steps vary by 30 %": {"step_jitter": 0.3},
}
SLICES_ELEMS = (3_125, 6_250, 12_500, 25_000, 50_000, 100_000)
DELAYS: dict[str, Point] = {
    "latency 10 us": {"latency_s": 10e-6},
    "latency 50 us": {"latency_s": 50e-6},
    "latency 500 us": {"latency_s": 500e-6},
    "latency 10 us, hosts 10 us": {"latency_s": 10e-6, "receive_s": 10e-6},
}
"""The delays from host to host; a host takes 150 us to notice a frame by default."""


def main(name: str, *options: str, points: Sequence[Point] | None = None) -> list[Point]:
    """Simulate ``points``, by default all, and write NAME.json, NAME-*.png and .svg."""
    path = Path(f"{name}.json")
    writable(path.parent)
    done: list[Point] = json.loads(path.read_text()) if path.exists() else []
    known = {_key(point) for point in done}
    asked = [p for p in (list(all_points()) if points is None else points) if _key(p) not in known]
    if "--draw" not in options:
        with contextlib.ExitStack() as stack:
            found: Iterator[Point] = map(simulate, asked)
            if points is None:
                found = stack.enter_context(Pool(2)).imap(simulate, asked)
            for point in found:
                done.append(point)
                path.write_text(json.dumps(done, indent=1) + "\n")
                print(*point.values(), flush=True)
    draw(done, name)
    return done


def _key(point: Point) -> str:
    return json.dumps({k: v for k, v in point.items() if k not in ("step_s", "limit_s", "size")})


def all_points() -> Iterator[Point]:
    for nodes in NODES:
        yield from grid("resnet50", nodes, SYSTEMS)
        yield from slices(nodes)
    for nodes in (16, 64, 1024):
        yield from disturbed(nodes)
    for nodes in (64, 1024, 4096):
        yield from latencies(nodes)
    for nodes in (4, 64, 1024):
        fine = ("p3-fine",) * (nodes > 64)  # the same as p3 on fewer
        yield from grid("vgg19", nodes, ("ddp", "ddp-tuned", "ring-tuned", *fine, "p3"))


def grid(model: str, nodes: int, systems: Sequence[str]) -> Iterator[Point]:
    for rate in RATES_BITS_PER_S:
        for system in systems:
            yield _point("rates", model, system, nodes, rate_bits_per_s=rate)


def slices(nodes: int) -> Iterator[Point]:
    """p3 on ResNet-50 by slice size; not so small that there are many for each server."""
    if nodes < 64:
        return
    for elems in SLICES_ELEMS:
        if elems * nodes >= 1_000_000:
            yield _point("slices", "resnet50", "p3", nodes, slice_elems=elems)


def latencies(nodes: int) -> Iterator[Point]:
    for delays in DELAYS.values():
        for system in ("ddp-tuned", "ring-tuned", "p3-fine"):
            yield _point("latency", "resnet50", system, nodes, **delays)


def disturbed(nodes: int) -> Iterator[Point]:
    for disturbance in DISTURBANCES:
        for system in ("ddp-tuned", "ring-tuned", "p3-fine"):
            yield _point("stragglers", "resnet50", system, nodes, disturbance=disturbance)


def _point(
    experiment: str,
    model: str,
    system: str,
    nodes: int,
    *,
    rate_bits_per_s: float = 10e9,
    **more: Any,
) -> Point:
    asked = {"experiment": experiment, "model": model, "system": system, "nodes": nodes}
    return {**asked, "rate_bits_per_s": rate_bits_per_s, **more}


def simulate(point: Point) -> Point:
    """Simulate a point: its step in seconds, the limit, and the size of what it sends at once."""
    preset, sizes = candidates(point)
    setting = _setting(point, preset, sizes)
    found = {size: _step_s(point, preset, size) for size in sizes}
    size = min(found, key=lambda each: found[each])
    return {**point, "step_s": found[size], "limit_s": setting.limit_s, "size": size}


def candidates(point: Point) -> tuple[str, Sequence[int]]:
    """The simulator's name of the system, and the sizes of which the best is taken."""
    system, nodes = point["system"], point["nodes"]
    if system in ("ddp", "ddp-tuned"):
        return "ddp", (25 * 2**20,) if system == "ddp" else BUCKETS_BYTES
    if system in ("ring", "ring-tuned"):
        tuned = next(CHUNKS_ELEMS[most] for most in CHUNKS_ELEMS if nodes <= most)
        return "ring", tuned if system == "ring-tuned" else (CHUNK_ELEMS,)
    if system == "p3-fine":
        elems = sum(math.prod(array.shape) for array in load_profile(point["model"]).arrays)
        return "p3", (
            max(LEAST_SLICE_ELEMS, min(SLICE_ELEMS, elems // (SLICES_PER_SERVER * nodes))),
        )
    return system, (point.get("slice_elems", SLICE_ELEMS),)


def _setting(point: Point, preset: str, sizes: Sequence[int]) -> SimulatedSetting:
    served = preset in ("p3", "slicing")
    return SimulatedSetting(
        profile=load_profile(point["model"]),
        systems=(preset,),
        nodes=point["nodes"],
        symmetric=True,
        representatives=4 if served and point["nodes"] <= FEW_NODES else 1,
        scale=1,
        compute_s=COMPUTE_S,
        rate_bits_per_s=point["rate_bits_per_s"],
        latency_s=point.get("latency_s", LATENCY_S),
        slice_elems=sizes[0] if served else SLICE_ELEMS,
        **DISTURBANCES[point.get("disturbance", "none")],
    )


def _step_s(point: Point, preset: str, size: int) -> float:
    setting = _setting(point, preset, (size,))
    drawn = setting.step_jitter > 0
    uncounted = RING_STEPS if preset == "ring" else DISCARDED_STEPS
    steps = uncounted + (8 if drawn else 1)
    changes: Point = {"chunk_elems": size} if preset == "ring" else {}
    if preset == "ddp":
        changes["bucket_bytes"] = size
    hosts = replace(HOSTS, receive_s=point.get("receive_s", HOSTS.receive_s))
    simulated = simulate_system(preset, setting, hosts, steps=steps, **changes)
    weights = [crowd.members for crowd in setting.crowds]
    each = [statistics.fmean(step_s[uncounted:]) for step_s in simulated.step_s]
    return statistics.fmean(each, weights=weights)


def draw(points: Sequence[Point], name: str) -> None:
    draw_rates(points, f"{name}-rates")
    draw_slices(points, f"{name}-slices")
    panels = [(f"{p['disturbance']}", p) for p in points if p["experiment"] == "stragglers"]
    draw_by_nodes(panels, f"{name}-stragglers", list(DISTURBANCES))
    panels = [(_delays(p), p) for p in points if p["experiment"] == "latency"]
    draw_by_nodes(panels, f"{name}-latency", list(DELAYS))


def _delays(point: Point) -> str:
    asked = {key: point[key] for key in ("latency_s", "receive_s") if key in point}
    return next(name for name, delays in DELAYS.items() if delays == asked)


def draw_rates(points: Sequence[Point], name: str) -> None:
    """Draw how near steps are to the limit, in a panel for each model and rate."""
    points = [p for p in points if p["experiment"] == "rates"]
    size = (3.0 * len(RATES_BITS_PER_S), 3.3 * len(MODELS))

    def draw_panels(figure: Figure) -> None:
        grid = figure.subplots(len(MODELS), len(RATES_BITS_PER_S), squeeze=False, sharey=True)
        for row, model in zip(grid, MODELS, strict=True):
            for ax, rate in zip(row, RATES_BITS_PER_S, strict=True):
                shown = [p for p in points if (p["model"], p["rate_bits_per_s"]) == (model, rate)]
                for system in SYSTEMS:
                    chosen = [p for p in shown if p["system"] == system]
                    plot(ax, system, [(p["nodes"], p["limit_s"] / p["step_s"]) for p in chosen])
                ax.set_title(f"{model}, {rate / 1e9:g} Gbit/s")
                _nodes_axis(ax)
            row[0].set_ylabel("limit / step, %")
        _legend(figure, grid[0][0])

    _save(draw_panels, size, name)


def plot(ax: Axes, system: str, shares: Sequence[tuple[int, float]]) -> None:
    style = style_of(system)
    ax.plot(
        [nodes for nodes, _ in sorted(shares)],
        [100 * share for _, share in sorted(shares)],
        color=style.light,
        marker=style.marker,
        linestyle=style.dashes,
        markersize=5,
        linewidth=1.3,
        label=LABELS[system],
    )


def _nodes_axis(ax: Axes) -> None:
    """Set the axis, with small numbers and a margin: panels' numbers must not touch."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(NODES, [str(nodes) for nodes in NODES], fontsize=7)
    ax.minorticks_off()
    ax.margins(x=0.08)
    ax.set_ylim(0, 104)
    ax.set_xlabel("nodes")


def draw_slices(points: Sequence[Point], name: str) -> None:
    def draw_lines(figure: Figure) -> None:
        ax = figure.subplots()
        for place, nodes in enumerate(NODES):
            chosen = sorted(
                (p["size"], p["step_s"])
                for p in points
                if p["experiment"] == "slices" and p["nodes"] == nodes
            )
            shade = ramp_colour(LIGHT_RAMP, place / (len(NODES) - 1))
            if chosen:
                ax.plot(
                    *zip(*chosen, strict=True),
                    marker="osD^vh"[place],
                    color=shade,
                    label=f"{nodes} nodes",
                )
        ax.axhline(COMPUTE_S, color=INK, linestyle=":", linewidth=1, label="compute")
        ax.set(xscale="log", yscale="log", xlabel="elements per slice", ylabel="step, s")
        ax.set_title("p3, resnet50, 10 Gbit/s")
        ax.set_xticks(SLICES_ELEMS, [f"{elems:,}" for elems in SLICES_ELEMS])
        ax.set_yticks((0.25, 0.5, 1, 2), ("0.25", "0.5", "1", "2"))
        ax.minorticks_off()
        _legend(figure, ax)

    _save(draw_lines, (6.4, 4.3), name)


def draw_by_nodes(points: Sequence[tuple[str, Point]], name: str, panels: Sequence[str]) -> None:
    def draw_panels(figure: Figure) -> None:
        row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for ax, title in zip(row, panels, strict=True):
            for system in ("p3-fine", "ring-tuned", "ddp-tuned"):
                chosen = [p for panel, p in points if panel == title and p["system"] == system]
                plot(ax, system, [(p["nodes"], COMPUTE_S / p["step_s"]) for p in chosen])
            ax.set_title(title)
            _nodes_axis(ax)
        row[0].set_ylabel("compute / step, %")
        _legend(figure, row[0])

    _save(draw_panels, (3.1 * len(panels), 3.3), name)


def _legend(figure: Figure, first: Axes) -> None:
    handles, labels = first.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _save(draw_all: Callable[[Figure], None], size: tuple[float, float], name: str) -> None:
    save(draw_all, size, *(Path(f"{name}.{suffix}") for suffix in ("svg", "png")))


if __name__ == "__main__":
    main(*sys.argv[1:])
