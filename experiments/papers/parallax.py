"""Parallax's Tables 1 and 4, and its Figs. 12 and 13, simulated (Kim et al., section 7).

python -m experiments.papers.parallax docs/results

Machines of six workers. ``ps`` is TensorFlow's: all by servers beside the workers, pulled when the
next step begins; ``mpi`` all-reduces dense gradients and gathers rows; ``hybrid`` is Parallax. What
a byte takes a server's processor is fitted to one published figure, LM's 9.4 times one worker on
48; all else follows from it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from experiments.papers.models import WORKERS_PER_MACHINE, ParallaxModel, four_models
from foreprop.simulate.run import simulate_system
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.hosts import Hosts
from foreprop.workload.setting import BUCKET_BYTES, RING_STEPS

PS, MPI, HYBRID, FORWARD = "ps", "mpi", "hybrid", "p3"
_SYSTEM = {PS: "tensorflow", MPI: "ddp-sparse", HYBRID: "hybrid", FORWARD: "p3"}
MACHINES = 8
_STEPS = 3
PUBLISHED: Mapping[str, float] = {"LM": 9.4, "NMT": 17.1, "ResNet-50": 39.8, "InceptionV3": 43.6}
"""Throughput on 48 workers over one worker's (section 7.3)."""
TABLE_4: Mapping[str, Sequence[float]] = {"LM": (101, 112, 251), "NMT": (87, 117, 188)}
"""Thousands of words/s: all by servers, with hybrid communication, with local aggregation."""
ABLATION: Sequence[tuple[str, dict[str, Any]]] = (
    (PS, {"local_aggregation": "off"}),
    (HYBRID, {"local_aggregation": "off"}),
    (HYBRID, {}),
)
_FITTED = "LM"
_FITTED_TO = 0.01
_MOST_TRIALS = 12


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    model: str
    system: str
    local_aggregation: bool
    machines: int
    workers: int
    server_s_per_gb: float
    step_s: float
    throughput: float
    """In the model's unit/s, of all workers."""
    normalised: float
    """Over one worker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """``rate_bits_per_s``: of each machine's link."""

    rate_bits_per_s: float = 100e9
    workers_per_machine: int = WORKERS_PER_MACHINE
    scale: int = 1
    chunk_elems: int = 8_000_000
    """Of ``hybrid``'s collectives, undivided: 94 passes of small ones would take longer."""

    def simulate(
        self,
        name: str,
        model: ParallaxModel,
        system: str,
        *,
        machines: int,
        server_s_per_gb: float,
        **changes: Any,
    ) -> Point:
        by_rows, relays = model.sparse_elems > 0, not changes
        if system == HYBRID:
            changes["chunk_elems"] = self.chunk_elems // self.scale
        setting = SimulatedSetting(
            profile=model.profile,
            systems=(_SYSTEM[system],),
            nodes=machines,
            workers_per_node=self.workers_per_machine,
            rate_bits_per_s=self.rate_bits_per_s / self.scale,
            scale=self.scale,
            compute_s=model.compute_s,
            rows=by_rows,
            together=model.together if by_rows else (),
            server_s_per_gb=server_s_per_gb,
            symmetric=False,
        )
        uncounted = RING_STEPS if system == HYBRID else 1
        bucket_bytes = setting.scaled(BUCKET_BYTES) if system == MPI else None
        simulated = simulate_system(
            _SYSTEM[system],
            setting,
            Hosts(),
            steps=uncounted + _STEPS,
            bucket_bytes=bucket_bytes,
            **changes,
        )
        step_s = statistics.fmean(s for steps in simulated.step_s for s in steps[uncounted:])
        workers = machines * self.workers_per_machine
        return Point(
            model=name,
            system=system,
            local_aggregation=relays,
            machines=machines,
            workers=workers,
            server_s_per_gb=server_s_per_gb,
            step_s=step_s,
            throughput=workers * model.batch / step_s,
            normalised=workers * model.compute_s / step_s,
        )


def fit_processor(testbed: Testbed, model: ParallaxModel, machines: int = MACHINES) -> float:
    """s/GB with which ``hybrid`` has the published throughput, to a hundredth; by halves.

    0 if it is no faster than that with a processor that costs nothing.
    """
    wanted_s = machines * testbed.workers_per_machine * model.compute_s / PUBLISHED[_FITTED]
    if wanted_s < model.compute_s:
        raise ValueError(f"{PUBLISHED[_FITTED]} times one worker takes more than as many workers")

    def error(cost: float) -> float:
        point = testbed.simulate(_FITTED, model, HYBRID, machines=machines, server_s_per_gb=cost)
        return point.step_s / wanted_s - 1

    if error(0.0) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    while error(high) < 0:
        low, high = high, 2 * high
    for _ in range(_MOST_TRIALS):
        cost = (low + high) / 2
        off = error(cost)
        if abs(off) <= _FITTED_TO:
            break
        low, high = (cost, high) if off < 0 else (low, cost)
    return (low + high) / 2


def study(
    models: Mapping[str, ParallaxModel],
    testbed: Testbed,
    machines: Sequence[int],
    cost: float | None = None,
) -> Iterator[Point]:
    """Table 4's steps on the most machines, then every system (Figs. 12, 13), the most first.

    ``cost``: of a server's processor, s/GB; None: fitted.
    """
    most = max(machines)
    if cost is None:
        cost = fit_processor(testbed, models[_FITTED], most)
    for name, model in models.items():
        if model.sparse_elems:
            for system, changes in ABLATION[:2]:
                yield testbed.simulate(
                    name, model, system, machines=most, server_s_per_gb=cost, **changes
                )
        for count in sorted(machines, reverse=True):
            for system in (HYBRID, PS, MPI, FORWARD):
                if system == HYBRID and not model.sparse_elems:
                    continue  # that is ``mpi`` with a planned order
                yield testbed.simulate(name, model, system, machines=count, server_s_per_gb=cost)


def main(
    out: str,
    machines: str = "2,4,8",
    names: str = "LM,NMT,ResNet-50,InceptionV3",
    cost: str | None = None,
) -> list[Point]:
    """Writes parallax.json; prints the tables."""
    known, points = four_models(), []
    models = {name: known[name] for name in names.split(",")}
    for point in study(
        models,
        Testbed(),
        [int(count) for count in machines.split(",")],
        None if cost is None else float(cost),
    ):
        points.append(point)
        print(
            f"{point.model}, {point.system}{'' if point.local_aggregation else ', no relays'},"
            f" {point.workers} workers, {point.server_s_per_gb:.2f} s/GB: {point.step_s:.3f} s,"
            f" {point.throughput:,.0f} {models[point.model].unit}/s, {point.normalised:.1f}",
            flush=True,
        )
        data = msgspec.json.format(msgspec.json.encode(points), indent=1)
        (Path(out) / "parallax.json").write_bytes(data + b"\n")
    for line in (*table_1(models, points), "", *table_4(points)):
        print(line)
    return points


def table_1(models: Mapping[str, ParallaxModel], points: Sequence[Point]) -> Iterator[str]:
    """Model, dense and sparse elements, alpha, and throughput, in Markdown."""
    yield "| model | dense elements | sparse | alpha | `ps` | `mpi` | `hybrid` | `p3` |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, model in models.items():
        shown = []
        for system in (PS, MPI, HYBRID, FORWARD):
            found = largest(points, name, system)
            shown.append("" if found is None else f"{found.throughput:,.0f} {model.unit}/s")
        sizes = f"{model.dense_elems / 1e6:.1f} M | {model.sparse_elems / 1e6:.1f} M"
        yield f"| {name} | {sizes} | {model.alpha:.2f} | {' | '.join(shown)} |"


def table_4(points: Sequence[Point]) -> Iterator[str]:
    """What hybrid communication and local aggregation are worth, beside what was published."""
    yield "| model | `ps`, no relays | + hybrid | + local aggregation |"
    yield "|---|---|---|---|"
    for name, published in TABLE_4.items():
        found = [largest(points, name, system, relays=not off) for system, off in ABLATION]
        if None in found:
            continue
        base = found[0]
        shown = [
            f"{point.throughput / base.throughput:.2f} ({own / published[0]:.2f})"
            for point, own in zip(found, published, strict=True)
            if point is not None and base is not None
        ]
        yield f"| {name} | {' | '.join(shown)} |"


def largest(
    points: Sequence[Point], model: str, system: str, *, relays: bool = True
) -> Point | None:
    """On the most machines."""
    same = [
        point
        for point in points
        if (point.model, point.system, point.local_aggregation) == (model, system, relays)
    ]
    return max(same, key=lambda point: point.machines, default=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
