"""Servers whose processors are slow: Alqahtani and Demirbas' Figs. 6 and 9, simulated.

python -m experiments.papers.processors docs/results

Their 1PS has its most images/s, 10,150, with five workers, and 2PS 13,570 with three. Servers here
take c seconds per GB, received or sent, on one processor each. c is fitted to 1PS with five; all
else is predicted. Their future work, "the trade-offs between network congestion and extra
computation", is the second part: batches added up before they are sent, and codecs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from experiments.mlp.training import SERVERS, mlp_profile
from foreprop.config import Config
from foreprop.core.slicing import Partition, plan_slices
from foreprop.simulate.run import simulate_system
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.hosts import Hosts

BATCH = 100
PUBLISHED = {"1ps": (5, 10_150), "2ps": (3, 13_570)}
"""Workers and images/s of the maximum (section IV.B)."""
WORKERS = range(2, 8)
CASES = ((128, 0.001), (256, 0.001), (512, 0.001), (256, 0.01))
"""Units of each hidden layer, and a batch's compute, s: the paper says neither."""
_FAST = 10e9
"""A link that does not count, bit/s."""
_STEPS, _UNCOUNTED = 8, 2
_FITTED_TO = 0.002
_TIMES = (1, 2, 4, 8)
_CODECS = (None, "bf16", "int8", "int4", "dgc:0.01")


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    study: str
    system: str
    hidden: int
    workers: int
    rate_bits_per_s: float
    server_s_per_gb: float
    compute_s: float
    batches: int = 1
    """That a worker adds up before it sends."""
    codec: str | None = None
    step_s: float
    images_per_s: float


def largest_share(hidden: int, servers: int) -> float:
    """Of the model's elements on the busiest of so many servers, where arrays stay whole."""
    config = Config.resolve("tensorflow")
    sizes = [
        s for layer in mlp_profile(hidden).layers(scale=1, compute_s=1.0) for s in layer.sizes_elems
    ]
    partition = Partition(
        granularity=config.granularity,
        placement=config.placement,
        servers=servers,
        slice_elems=config.cut_elems(servers),
        big_array_elems=config.big_array_elems,
    )
    loads = [0] * servers
    for piece in plan_slices(sizes, [4] * len(sizes), partition):
        loads[piece.server] += piece.elems
    return max(loads) / sum(loads)


def simulate(
    study: str,
    system: str,
    *,
    workers: int,
    hidden: int = 256,
    rate_bits_per_s: float = _FAST,
    server_s_per_gb: float = 0.0,
    compute_s: float,
    batches: int = 1,
    codec: str | None = None,
    preset: str = "tensorflow",
) -> Throughput:
    setting = SimulatedSetting(
        profile=mlp_profile(hidden),
        systems=(preset,),
        nodes=workers,
        scale=1,
        rate_bits_per_s=rate_bits_per_s,
        compute_s=batches * compute_s,
        dedicated_servers=SERVERS.get(system, 0),
        server_s_per_gb=server_s_per_gb,
        compression=codec,
    )
    simulated = simulate_system(preset, setting, Hosts(), steps=_UNCOUNTED + _STEPS)
    step_s = statistics.fmean(s for steps in simulated.step_s for s in steps[_UNCOUNTED:])
    return Throughput(
        study=study,
        system=system,
        hidden=hidden,
        workers=workers,
        rate_bits_per_s=rate_bits_per_s,
        server_s_per_gb=server_s_per_gb,
        compute_s=compute_s,
        batches=batches,
        codec=codec,
        step_s=step_s,
        images_per_s=workers * batches * BATCH / step_s,
    )


def fitted_s_per_gb(hidden: int, compute_s: float) -> float:
    """With which 1PS has the published images/s with five workers, by secants."""
    workers, images_per_s = PUBLISHED["1ps"]
    about = {"hidden": hidden, "compute_s": compute_s, "workers": workers}

    def step_s(cost: float) -> float:
        return simulate("fit", "1ps", server_s_per_gb=cost, **about).step_s  # type: ignore[arg-type]

    wanted_s = workers * BATCH / images_per_s
    costs, steps_s = [1.0, 5.0], [step_s(1.0), step_s(5.0)]
    while abs(steps_s[-1] / wanted_s - 1) > _FITTED_TO:
        slope = (steps_s[-1] - steps_s[-2]) / (costs[-1] - costs[-2])
        costs.append(costs[-1] + (wanted_s - steps_s[-1]) / slope)
        steps_s.append(step_s(costs[-1]))
    return costs[-1]


def peaks(
    workers: Sequence[int] = WORKERS, cases: Sequence[tuple[int, float]] = CASES
) -> Iterator[Throughput]:
    """1PS, 2PS and 4PS by workers, with the processor's cost that 1PS's maximum says."""
    for hidden, compute_s in cases:
        cost = fitted_s_per_gb(hidden, compute_s)
        about = {"hidden": hidden, "compute_s": compute_s, "server_s_per_gb": cost}
        for system in SERVERS:
            for count in workers:
                yield simulate("peaks", system, workers=count, **about)  # type: ignore[arg-type]


def trade_offs(workers: Sequence[int] = (2, 4, 7)) -> Iterator[Throughput]:
    """Congestion against computation on one server, at 100 Mbit/s: more batches, or codecs.

    A batch takes 50 ms. Adding up k batches sends 1/k of the bytes per image, and changes the
    training: it is one with k times the batch. A codec's computation is `core.codecfacts`'.
    """
    for count in workers:
        common = {"workers": count, "rate_bits_per_s": 100e6, "compute_s": 0.05}
        for batches in _TIMES:
            yield simulate("batches", "1ps", batches=batches, **common)  # type: ignore[arg-type]
        for codec in _CODECS:
            yield simulate("codecs", "1ps", codec=codec, preset="p3", **common)  # type: ignore[arg-type]


def main(out: str, workers: str = "2,3,4,5,6,7") -> list[Throughput]:
    """Writes processors.json; prints what was simulated beside what was published."""
    counts = [int(count) for count in workers.split(",")]
    found = []
    for point in (*peaks(counts), *trade_offs([n for n in (2, 4, 7) if n in counts])):
        found.append(point)
        print(
            f"{point.study} {point.system} hidden {point.hidden}, {point.workers} workers,"
            f" {point.server_s_per_gb:.2f} s/GB, {point.batches} batches, {point.codec}:"
            f" {point.images_per_s:,.0f} images/s"
        )
    data = msgspec.json.format(msgspec.json.encode(found), indent=1)
    (Path(out) / "processors.json").write_bytes(data + b"\n")
    for line in summary(found):
        print(line)
    return found


def summary(found: Sequence[Throughput]) -> Iterator[str]:
    """Of each system the most images/s, and the fewest workers that reach 98 % of it."""
    yield "| hidden, compute | c | system | most images/s | published | 98 % from | published |"
    yield "|---|---|---|---|---|---|---|"
    peaks_of = [each for each in found if each.study == "peaks"]
    for hidden, compute_s, cost in dict.fromkeys(map(_case, peaks_of)):
        for system in SERVERS:
            case = (hidden, compute_s, cost)
            own = [p for p in peaks_of if p.system == system and _case(p) == case]
            most = max(p.images_per_s for p in own)
            first = min(p.workers for p in own if p.images_per_s > 0.98 * most)
            at, published = PUBLISHED.get(system, ("", 0))
            shown = f"{published:,}" if published else ""
            yield (
                f"| {hidden}, {1e3 * compute_s:g} ms | {cost:.2f} s/GB | `{system}` |"
                f" {most:,.0f} | {shown} | {first} workers | {at} |"
            )


def _case(point: Throughput) -> tuple[int, float, float]:
    return point.hidden, point.compute_s, point.server_s_per_gb


if __name__ == "__main__":
    main(*sys.argv[1:])
