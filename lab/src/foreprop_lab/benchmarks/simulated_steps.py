"""The simulator beside the lab: every record of a results.json simulated, and a scatter plot.

python -m foreprop_lab.benchmarks.simulated_steps lab/docs/results/results.json \\
    lab/docs/results/simulated-steps

Prints every record's error.

With a third file, records of `foreprop lab simulate` that were written before the lab measured, the
measured ones are compared with these.

cd lab/docs/results
python -m foreprop_lab.benchmarks.simulated_steps MEASURED predicted-steps predicted.json

``--spread 0.3`` draws connections' windows (`Hosts.window_spread`). Steps are a block of the lab's:
five after one that does not count, before which all workers have met.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from foreprop.plan.profile import load_profile
from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import INK, QUIET, save, style_of
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.records import Record, read_records
from foreprop_lab.simulate.run import simulate_lab
from foreprop_lab.simulate.setting import SIMULATED_SYSTEMS, SimulatedSetting

ITERATIONS = 5
Point = dict[str, float | str]


def main(
    results: str, name: str, predicted: str | None = None, *, hosts: Hosts | None = None
) -> dict[str, list[Point]]:
    """Write NAME.svg, NAME.png and NAME.json; print the errors by system."""
    writable(Path(name).parent)
    written = [] if predicted is None else read_records(Path(predicted))
    points: dict[str, list[Point]] = {}
    for record in read_records(Path(results)):
        known = record.system in SIMULATED_SYSTEMS
        if known and record.has_usual_slices and not record.cpu_bound:
            simulated = find(record, written) if predicted else simulate(record, hosts)
            points.setdefault(record.system, []).append(compare(record, simulated))
    for line in table(points):
        print(line)
    for system, compared in points.items():
        print(system, describe(compared))
    draw(points, name)
    Path(f"{name}.json").write_text(json.dumps(points, indent=1) + "\n")
    return points


def table(points: dict[str, list[Point]]) -> Iterator[str]:
    """Every record's error, in Markdown; several of one place beside each other."""
    cells: dict[tuple[str, int, float], dict[str, list[str]]] = {}
    for system, compared in points.items():
        for point in compared:
            place = (str(point["model"]), int(point["nodes"]), round(float(point["balance"]), 2))
            error = float(point["simulated_s"]) / float(point["measured_s"]) - 1
            cells.setdefault(place, {}).setdefault(system, []).append(f"{100 * error:+.1f}")
    yield "| model | nodes | balance | " + " | ".join(f"`{system}`" for system in points) + " |"
    yield "|---" * (3 + len(points)) + "|"
    for (model, nodes, balance), errors in sorted(cells.items()):
        shown = (", ".join(errors.get(system, [])) for system in points)
        yield f"| {model} | {nodes} | {balance:g} | {' | '.join(shown)} |"


def find(record: Record, written: list[Record]) -> Record:
    (same,) = [
        other
        for other in written
        if (other.model, other.system, other.nodes, other.scale)
        == (record.model, record.system, record.nodes, record.scale)
        and math.isclose(other.rate_bits_per_s, record.rate_bits_per_s, rel_tol=1e-9)
        and math.isclose(other.compute_s, record.compute_s, rel_tol=1e-9)
    ]
    return same


def simulate(record: Record, hosts: Hosts | None = None) -> Record:
    setting = SimulatedSetting(
        profile=load_profile(record.model),
        systems=(record.system,),
        nodes=record.nodes,
        scale=record.scale,
        compute_s=record.compute_s,
        rate_bits_per_s=record.rate_bits_per_s,
        iterations=ITERATIONS,
        warm_up=1,
        slice_elems=record.slice_elems * record.scale,
    )
    (simulated,) = simulate_lab(setting, hosts=hosts)
    return simulated


def compare(record: Record, simulated: Record) -> Point:
    """The steps as they were measured and as they are simulated, by the device's compute."""
    return {
        "model": record.model,
        "nodes": record.nodes,
        "balance": record.balance,
        "compute_s": record.compute_s,
        "measured_s": record.iteration_s.median,
        "simulated_s": simulated.iteration_s.median,
    }


def describe(compared: list[Point]) -> str:
    errors = [float(p["simulated_s"]) / float(p["measured_s"]) - 1 for p in compared]
    absolute = [abs(error) for error in errors]
    return (
        f"{len(errors)} records, error {statistics.median(absolute):.1%} in the median,"
        f" {max(absolute):.1%} at most, {statistics.fmean(errors):+.1%} on average"
    )


def draw(points: dict[str, list[Point]], name: str) -> None:
    paths = [Path(f"{name}.{suffix}") for suffix in ("svg", "png")]
    save(partial(_draw_points, points), (6, 6), *paths)


def _draw_points(points: dict[str, list[Point]], figure: Figure) -> None:
    axes = figure.subplots()
    for system, compared in points.items():
        x, y = (
            [float(p[key]) / float(p["compute_s"]) for p in compared]
            for key in ("measured_s", "simulated_s")
        )
        style = style_of(system)
        axes.scatter(x, y, color=style.light, marker=style.marker, alpha=0.75, label=system)
    ends = (1.0, max(axes.get_xlim()[1], axes.get_ylim()[1]))
    axes.plot(ends, ends, color=INK, linewidth=1)
    for share in (0.88, 1.12):
        axes.plot(ends, [share * end for end in ends], color=QUIET, linewidth=1, linestyle=":")
    axes.set(xlabel="measured step / compute", ylabel="simulated step / compute")
    axes.legend(title="dotted: 12 % off")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for argument, many in (("results", None), ("name", None), ("predicted", "?")):
        parser.add_argument(argument, nargs=many)
    parser.add_argument("--spread", type=float, default=0.0)
    given = parser.parse_args()
    asked = (given.results, given.name, given.predicted)
    main(*asked, hosts=Hosts(window_spread=given.spread))
