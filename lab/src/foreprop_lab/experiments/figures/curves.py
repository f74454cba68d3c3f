"""What charts show, computed from records and samples: numbers only, which are also kept as JSON.

Throughput is the number of workers over the median seconds of a step (the mean, where steps are to
differ): batches per second of all workers together. The emulated device has no batch size, so it is
not in samples per second as in the paper; of one model and setting the ratios are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from foreprop.plan import limit
from foreprop_lab.experiments.figures.comparison import in_order, model_name
from foreprop_lab.experiments.figures.sweeps import SCALE
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record

THROUGHPUT_LABEL = "batches/s, all workers"
RATE_LABEL = "link rate, Gbit/s (of the undivided model)"
_LIMIT_POINTS = 80
_WINDOW_STEPS = 2.2
_LEAST_INTERVAL_S = 0.005
_ACROSS = 0.04
"""How far the limit line goes beyond the outer points, as a share of the range."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput at one place of the sweep; ``low`` and ``high`` are the steps' p90 and p10."""

    x: float
    throughput: float
    low: float
    high: float
    cpu_bound: bool


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    points: list[Point]


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    logarithmic: bool = False
    ticks: list[tuple[float, str]] = []
    """Places and their labels; if empty, matplotlib chooses them."""
    second_label: str = ""
    second_ticks: list[tuple[float, str]] = []
    """Places and labels of the ticks above the chart."""
    mark: tuple[float, str] | None = None
    """A place that gets a thin line, and its label."""


class ThroughputPanel(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    axis: Axis
    curves: list[Curve]
    limit: list[tuple[float, float]]
    """(x, the largest throughput of any schedule), headers counted; see `LabSetting.limit_s`."""


class UtilisationPanel(msgspec.Struct, frozen=True, kw_only=True):
    """Both directions of node 0's link over about two steps; shares of the link's rate."""

    system: str
    model: str
    rate_bits_per_s: float
    seconds: list[float]
    """When each interval begins, and when the last one ends."""
    sent_share: list[float]
    received_share: list[float]


Measured = tuple[LabSetting, Sequence[Record]]
"""A setting, and the records of the run that measured it."""


def bandwidth_panels(runs: Sequence[Measured]) -> list[ThroughputPanel]:
    """One per model: throughput over the links' rate, in Gbit/s of the undivided model."""
    return [_bandwidth_panel(model, of_model) for model, of_model in _by_model(runs).items()]


def _bandwidth_panel(model: str, runs: Sequence[Measured]) -> ThroughputPanel:
    setting = runs[0][0]
    rates = sorted(run_setting.rate for run_setting, _ in runs)
    margin = _ACROSS * (rates[-1] - rates[0])
    grid = _spaced(rates[0] - margin, rates[-1] + margin)
    balances = sorted((unscaled_gbit_per_s(s.rate), f"{_balance(s):.3g}") for s, _ in runs)
    return ThroughputPanel(
        title=model_name(model),
        axis=Axis(
            label=RATE_LABEL,
            second_label="balance: wire time / compute",
            second_ticks=balances,
        ),
        curves=_curves(runs, lambda s: unscaled_gbit_per_s(s.rate)),
        limit=[
            (unscaled_gbit_per_s(rate), setting.nodes / _at_rate(setting, rate).limit_s)
            for rate in grid
        ],
    )


def _at_rate(setting: LabSetting, rate_bits_per_s: float) -> LabSetting:
    return replace(setting, balance=None, rate_bits_per_s=rate_bits_per_s)


def _balance(setting: LabSetting) -> float:
    layers = setting.layers
    wire_s = limit.wire_s(
        limit.model_bytes(layers), nodes=setting.nodes, rate_bits_per_s=setting.rate
    )
    return wire_s / limit.compute_s(layers)


def nodes_panels(runs: Sequence[Measured]) -> list[ThroughputPanel]:
    """One per model: throughput over the number of nodes."""
    return [_nodes_panel(model, of_model) for model, of_model in _by_model(runs).items()]


def _nodes_panel(model: str, runs: Sequence[Measured]) -> ThroughputPanel:
    setting = runs[0][0]
    rate = setting.rate
    counts = sorted({s.nodes for s, _ in runs})
    balances = sorted((float(s.nodes), f"{_balance(s):.2f}") for s, _ in runs)
    return ThroughputPanel(
        title=f"{model_name(model)}, {unscaled_gbit_per_s(rate):.2g} Gbit/s",
        axis=Axis(
            label="nodes",
            logarithmic=True,
            ticks=[(float(n), str(n)) for n in counts],
            second_label="balance: wire time / compute",
            second_ticks=balances,
        ),
        curves=_curves(runs, lambda s: float(s.nodes)),
        limit=sorted({(float(s.nodes), s.nodes / _at_rate(s, rate).limit_s) for s, _ in runs}),
    )


def slice_size_panels(runs: Sequence[Measured]) -> list[ThroughputPanel]:
    """One per model: throughput over the largest slice, in elements of the unscaled model."""
    return [_slice_size_panel(model, of_model) for model, of_model in _by_model(runs).items()]


def _slice_size_panel(model: str, runs: Sequence[Measured]) -> ThroughputPanel:
    setting = runs[0][0]
    sizes = sorted({s.unscaled_slice_elems for s, _ in runs})
    best = setting.nodes / setting.limit_s
    return ThroughputPanel(
        title=model_name(model),
        axis=Axis(
            label="largest slice, elements",
            logarithmic=True,
            ticks=[(float(size), _short(size)) for size in sizes],
            mark=(50_000.0, "P3's choice"),
        ),
        curves=_curves(runs, lambda s: float(s.unscaled_slice_elems)),
        limit=[(sizes[0] * 0.7, best), (sizes[-1] / 0.7, best)],
    )


def _short(count: int) -> str:
    for unit, factor in (("M", 1_000_000), ("k", 1_000)):
        if count >= factor:
            return f"{count / factor:g}{unit}"
    return str(count)


def _by_model(runs: Sequence[Measured]) -> dict[str, list[Measured]]:
    models: dict[str, list[Measured]] = {}
    for setting, records in runs:
        models.setdefault(setting.profile.name, []).append((setting, records))
    return models


def _curves(runs: Sequence[Measured], x_of: Callable[[LabSetting], float]) -> list[Curve]:
    points: dict[str, list[Point]] = {}
    for setting, records in runs:
        for record in records:
            points.setdefault(record.system, []).append(_point(x_of(setting), record))
    return [
        Curve(system=name, points=sorted(points[name], key=lambda p: p.x))
        for name in in_order(points)
    ]


def _point(x: float, record: Record) -> Point:
    spread = record.iteration_s
    # With few steps the deciles are extrapolated: they may not enclose the median, or pass zero.
    low = record.nodes / max(spread.p90, spread.median)
    fastest_s = min(spread.p10, spread.median)
    throughput = record.nodes / record.typical_s
    return Point(
        x=x,
        throughput=throughput,
        low=low,
        high=record.nodes / fastest_s if fastest_s > 0 else throughput,
        cpu_bound=record.cpu_bound,
    )


def _spaced(first: float, last: float) -> list[float]:
    gap = (last - first) / (_LIMIT_POINTS - 1)
    return [first + i * gap for i in range(_LIMIT_POINTS)] if gap > 0 else [first]


def utilisation_panels(
    records: Iterable[Record], samples: dict[str, list[tuple[float, int, int]]]
) -> list[UtilisationPanel]:
    """One per system with samples, all over the same time: about two of the slowest's steps."""
    sampled = [r for r in records if len(samples.get(r.system, ())) > 1]
    window_s = _WINDOW_STEPS * max((r.iteration_s.median for r in sampled), default=0.0)
    return [_utilisation(r, samples[r.system], window_s) for r in sampled]


def _utilisation(
    record: Record, samples: Sequence[tuple[float, int, int]], window_s: float
) -> UtilisationPanel:
    # In the first step after a pause TCP starts slowly, so that step is not typical.
    first_s = min(record.iteration_s.median, max(0.0, samples[-1][0] - window_s))
    inside = _spaced_out([s for s in samples if first_s <= s[0] <= first_s + window_s])
    pairs = list(itertools.pairwise(inside))
    bytes_per_s = record.rate_bits_per_s / 8
    return UtilisationPanel(
        system=record.system,
        model=record.model,
        rate_bits_per_s=record.rate_bits_per_s,
        seconds=[s[0] - inside[0][0] for s in inside],
        sent_share=[(b[1] - a[1]) / (b[0] - a[0]) / bytes_per_s for a, b in pairs],
        received_share=[(b[2] - a[2]) / (b[0] - a[0]) / bytes_per_s for a, b in pairs],
    )


def _spaced_out(samples: Sequence[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Leave out samples that follow another too closely to give a meaningful rate."""
    kept: list[tuple[float, int, int]] = []
    for sample in samples:
        if not kept or sample[0] - kept[-1][0] >= _LEAST_INTERVAL_S:
            kept.append(sample)
    return kept


def unscaled_gbit_per_s(rate_bits_per_s: float) -> float:
    """The rate at which the whole model would have the same wire time."""
    return rate_bits_per_s * SCALE / 1e9


def unscaled_rate(rate_bits_per_s: float) -> str:
    """`unscaled_gbit_per_s` in words: 1.23 Gbit/s."""
    return f"{unscaled_gbit_per_s(rate_bits_per_s):.3g} Gbit/s"
