"""Parallax's Tables 1 and 4, and its Figs. 12 and 13, simulated (Kim et al., section 7).

    python -m foreprop_lab.experiments.papers.parallax lab/docs/results

Machines have six workers. ``ps`` is TensorFlow's: servers beside the workers have everything, and
each worker pulls for itself when the next step begins; ``mpi`` all-reduces dense gradients and
gathers rows; ``hybrid`` is Parallax.

A byte's time on a server's processor is fitted to two published figures on 48 workers: that of
dense arrays to ResNet-50's servers, 1.4 times Parallax's step; that of rows to LM's 9.4 times one
worker. ``horovod`` is the ``mpi`` that the paper had: lists of rows pass OpenMPI and the workers'
processors, whose time for a gathered byte is fitted to LM's 6.3 times Parallax's step on 36. All
else follows.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from foreprop.plan.deployment import BUCKET_BYTES
from foreprop.tools.cli.options import writable
from foreprop.tools.compare.result import write_records
from foreprop_lab.experiments.papers.fitting import fitted
from foreprop_lab.experiments.papers.models import WORKERS_PER_MACHINE, ParallaxModel, four_models
from foreprop_lab.experiments.papers.parallaxcharts import draw
from foreprop_lab.experiments.papers.parallaxtables import (
    DENSE_PS_SLOWER,
    FORWARD,
    HOROVOD,
    HOROVOD_SLOWER,
    HOROVOD_SLOWER_LATER,
    HOROVOD_WORKERS,
    HYBRID,
    MPI,
    NORMALISED,
    PS,
    SYSTEM,
    Point,
    curve,
    merged,
    read_points,
    table_1,
    table_4,
)
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import RING_STEPS
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

_STEPS = 2
_FITTED_TO = 0.01
_DENSE, _SPARSE = "ResNet-50", "LM"
"""The models whose published figures the costs are fitted to."""


class Costs(NamedTuple):
    """The processors' times for each GB, in seconds."""

    dense_s_per_gb: float
    """A server's time for dense arrays."""
    row_s_per_gb: float
    """A server's time for tables' rows."""
    gathered_s_per_gb: float = 0.0
    """A worker's time for the rows that it gathers of others with ``horovod``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Machines whose links have ``rate_bits_per_s``; ``scale`` divides arrays and links.

    Copies within a machine are not slowed down: they pass as on a memory of 20 GB/s.
    """

    rate_bits_per_s: float = 100e9
    workers_per_machine: int = WORKERS_PER_MACHINE
    scale: int = 8
    chunk_elems: int = 8_000_000
    """The elements of ``hybrid``'s chunks, undivided: 94 passes of small ones take longer."""

    def simulate(
        self,
        name: str,
        model: ParallaxModel,
        system: str,
        *,
        machines: int,
        costs: Costs,
        relays: bool = True,
    ) -> Point:
        by_rows = model.sparse_elems > 0
        changes: dict[str, Any] = {} if relays else {"local_aggregation": "off"}
        if system == HYBRID:
            changes["chunk_elems"] = self.chunk_elems // self.scale
        hosts = Hosts(server_row_byte_s=costs.row_s_per_gb * 1e-9 * self.scale)
        if system == HOROVOD:
            hosts = replace(hosts, gathered_byte_s=costs.gathered_s_per_gb * 1e-9 * self.scale)
        setting = SimulatedSetting(
            profile=model.as_lists if system == HOROVOD else model.profile,
            systems=(SYSTEM[system],),
            nodes=machines,
            workers_per_node=self.workers_per_machine,
            rate_bits_per_s=self.rate_bits_per_s / self.scale,
            scale=self.scale,
            compute_s=model.compute_s,
            rows=by_rows,
            together=model.together if by_rows else (),
            server_s_per_gb=costs.dense_s_per_gb,
            symmetric=False,
        )
        uncounted = RING_STEPS if system == HYBRID else 1
        simulated = simulate_system(
            SYSTEM[system],
            setting,
            hosts,
            steps=uncounted + _STEPS,
            bucket_bytes=setting.scaled(BUCKET_BYTES) if system in (MPI, HOROVOD) else None,
            **changes,
        )
        step_s = simulated.mean_step_s(uncounted)
        workers = machines * self.workers_per_machine
        return Point(
            model=name,
            system=system,
            local_aggregation=relays,
            machines=machines,
            workers=workers,
            dense_s_per_gb=costs.dense_s_per_gb,
            row_s_per_gb=costs.row_s_per_gb,
            gathered_s_per_gb=costs.gathered_s_per_gb if system == HOROVOD else 0.0,
            step_s=step_s,
            throughput=workers * model.batch / step_s,
            unit=model.unit,
            normalised=workers * model.compute_s / step_s,
        )


def fit_dense(testbed: Testbed, model: ParallaxModel, machines: int) -> float:
    """s/GB with which TensorFlow's servers are as much slower than all-reduce as published."""
    reduced = testbed.simulate(_DENSE, model, MPI, machines=machines, costs=Costs(0.0, 0.0))

    def step_s(cost: float) -> float:
        costs = Costs(cost, 0.0)
        point = testbed.simulate(_DENSE, model, PS, machines=machines, costs=costs, relays=False)
        return point.step_s

    wanted_s = DENSE_PS_SLOWER * reduced.step_s
    return fitted(step_s, wanted_s, first=(0.5, 1.0), within=_FITTED_TO)


def fit_rows(testbed: Testbed, model: ParallaxModel, machines: int) -> float:
    """s/GB with which ``hybrid`` has the published throughput; no dense array passes a server."""
    workers = machines * testbed.workers_per_machine
    wanted_s = workers * model.compute_s / NORMALISED[_SPARSE]
    if wanted_s < model.compute_s:
        raise ValueError(f"{NORMALISED[_SPARSE]} times one worker takes more than {workers}")

    def step_s(cost: float) -> float:
        costs = Costs(0.0, cost)
        return testbed.simulate(_SPARSE, model, HYBRID, machines=machines, costs=costs).step_s

    return fitted(step_s, wanted_s, first=(4.0, 6.0), within=_FITTED_TO)


def fit_gathered(testbed: Testbed, model: ParallaxModel, machines: int, wanted_s: float) -> float:
    """s/GB with which an all-gather of lists takes so long a step; no servers are involved."""

    def step_s(cost: float) -> float:
        costs = Costs(0.0, 0.0, cost)
        return testbed.simulate(_SPARSE, model, HOROVOD, machines=machines, costs=costs).step_s

    return fitted(step_s, wanted_s, first=(1.0, 2.0), within=_FITTED_TO)


def gathered_costs(
    testbed: Testbed, model: ParallaxModel, points: Sequence[Point]
) -> dict[str, float]:
    """s/GB that make the all-gather as slow as published, and as slow as servers; the first counts.

    ``points`` are LM's. They are fitted on as many workers as the paper has, or on the most. Raises
    ValueError if there are none.
    """
    parallax = curve(points, _SPARSE, HYBRID)
    if not parallax:
        raise ValueError(f"{HOROVOD} is fitted to {_SPARSE}: name it, too, or give three costs")
    first = next((p for p in parallax if p.workers == HOROVOD_WORKERS), parallax[-1])
    most, servers = parallax[-1], curve(points, _SPARSE, PS)[-1]
    wanted = {
        f"{HOROVOD_SLOWER} times Parallax": (first, HOROVOD_SLOWER * first.step_s),
        f"{HOROVOD_SLOWER_LATER} times": (most, HOROVOD_SLOWER_LATER * most.step_s),
        "as servers": (most, servers.step_s),
    }
    return {
        f"{name}, {at.workers} workers": fit_gathered(testbed, model, at.machines, wanted_s)
        for name, (at, wanted_s) in wanted.items()
    }


def study(
    models: Mapping[str, ParallaxModel],
    testbed: Testbed,
    machines: Sequence[int],
    costs: Costs,
    systems: Collection[str],
) -> Iterator[Point]:
    """Simulate the systems (Figs. 12, 13) from the most machines on, and there Table 4's steps."""
    most = max(machines)
    for name, model in models.items():
        sparse = model.sparse_elems > 0
        for count in sorted(machines, reverse=True):
            wanted = [(HYBRID, True)] * sparse + [(PS, False), (MPI, True), (FORWARD, True)]
            wanted += [(HOROVOD, True)] * sparse
            if count == most:
                wanted += [(HYBRID, False)] * sparse + [(PS, True)]
            for system, relays in wanted:
                if system in systems:
                    yield testbed.simulate(
                        name, model, system, machines=count, costs=costs, relays=relays
                    )


def main(
    out: str,
    machines: str = "2,4,6,8",
    names: str = "ResNet-50,InceptionV3,LM,NMT",
    costs: str | None = None,
    systems: str = ",".join(SYSTEM),
) -> list[Point]:
    """Add to parallax.json, draw Figs. 12 and 13, and print the tables.

    ``costs`` are those of dense bytes, of rows and of gathered ones in s/GB, as 0.5,5,2; the others
    are fitted. ``systems`` are simulated anew.
    """
    folder, known, testbed = writable(Path(out)), four_models(), Testbed()
    counts = [int(count) for count in machines.split(",")]
    chosen = set(systems.split(","))
    given = [] if costs is None else [float(cost) for cost in costs.split(",")]
    used = Costs(*given) if given else fit_servers(testbed, known, max(counts))
    print(f"{used.dense_s_per_gb:.3f} s/GB of dense arrays, {used.row_s_per_gb:.3f} of rows")
    models = {name: known[name] for name in names.split(",")}
    points = read_points(folder / "parallax.json")
    points = _record(points, study(models, testbed, counts, used, chosen - {HOROVOD}), folder)
    if HOROVOD in chosen and any(model.sparse_elems for model in models.values()):
        if len(given) < len(Costs._fields):
            found = gathered_costs(testbed, known[_SPARSE], points)
            for name, cost in found.items():
                print(f"all-gather of lists, {name}: {cost:.3f} s/GB", flush=True)
            used = used._replace(gathered_s_per_gb=next(iter(found.values())))
        points = _record(points, study(models, testbed, counts, used, {HOROVOD}), folder)
    draw(folder)
    sizes = {name: (m.dense_elems, m.sparse_elems, m.alpha) for name, m in known.items()}
    for line in (*table_1(sizes, points), "", *table_4(points)):
        print(line)
    return points


def fit_servers(testbed: Testbed, known: Mapping[str, ParallaxModel], machines: int) -> Costs:
    return Costs(
        fit_dense(testbed, known[_DENSE], machines), fit_rows(testbed, known[_SPARSE], machines)
    )


def _record(points: list[Point], made: Iterator[Point], folder: Path) -> list[Point]:
    """Add each point to the others as soon as it is simulated, and write them to the file."""
    for point in made:
        points = merged(points, [point])
        print(
            f"{point.label}, {point.workers} workers: {point.step_s:.3f} s,"
            f" {point.throughput:,.0f} {point.unit}/s, {point.normalised:.1f}",
            flush=True,
        )
        write_records(folder / "parallax.json", points)
    return points


if __name__ == "__main__":
    main(*sys.argv[1:])
