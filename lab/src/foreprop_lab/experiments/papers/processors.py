"""Servers whose processors are slow: Alqahtani and Demirbas' Figs. 6 and 9, simulated.

    python -m foreprop_lab.experiments.papers.processors lab/docs/results

Their 1PS has its most images/s, 10,150, with five workers, and 2PS 13,570 with three. Servers here
take c seconds per GB, received or sent, on one processor each. c is fitted to 1PS with five; all
else is predicted. The second part is their future work, "the trade-offs between network congestion
and extra computation": batches added up before they are sent, and codecs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from foreprop.config import Config
from foreprop.core.slicing import Partition, plan_slices
from foreprop.tools.cli.options import writable
from foreprop.tools.compare.result import write_records
from foreprop_lab.experiments.mlp.training import SERVERS, mlp_profile
from foreprop_lab.experiments.papers.fitting import fitted
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

BATCH = 100
PUBLISHED = {"1ps": (5, 10_150), "2ps": (3, 13_570)}
"""The workers and images/s of each maximum (section IV.B)."""
WORKERS = range(2, 8)
CASES = ((128, 0.001), (256, 0.001), (512, 0.001), (256, 0.01))
"""The units of each hidden layer, and a batch's compute in s: the paper has neither."""
OF_A_SERVER, OF_ALL = "pairs of a server's", "pairs of all"
CONTENDED = (
    (OF_A_SERVER, 256, 0.003, 75e-6),
    (OF_A_SERVER, 512, 0.003, 111e-6),
    (OF_ALL, 256, 0.003, 75e-6),
    (OF_ALL, 512, 0.003, 111e-6),
)
"""The connections that disturb each other, hidden units, compute, and the cost of a pair in s.

The first one has both published peaks; it was found among `tried`.
"""
TRIED_S, TRIED_SHARES = (0.001, 0.002, 0.003, 0.004), (27, 40)
"""The compute of a batch, and which fractions of it a pair costs: 1/27 and 1/40."""
_FAST = 10e9
"""The rate of a link that takes no time that counts, in bit/s."""
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
    """How many batches a worker adds up before it sends."""
    codec: str | None = None
    step_s: float
    images_per_s: float


def largest_share(hidden: int, servers: int) -> float:
    """The share of the model on the busiest of so many servers, where arrays stay whole."""
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
    step_s = simulated.mean_step_s(_UNCOUNTED)
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
    """The cost with which 1PS has the published images/s with five workers."""
    workers, images_per_s = PUBLISHED["1ps"]
    about = {"hidden": hidden, "compute_s": compute_s, "workers": workers}

    def step_s(cost: float) -> float:
        return simulate("fit", "1ps", server_s_per_gb=cost, **about).step_s  # type: ignore[arg-type]

    wanted_s = workers * BATCH / images_per_s
    return fitted(step_s, wanted_s, first=(1.0, 5.0), within=_FITTED_TO)


def peaks(
    workers: Sequence[int] = WORKERS, cases: Sequence[tuple[int, float]] = CASES
) -> Iterator[Throughput]:
    """1PS, 2PS and 4PS by workers, with the processor's cost that 1PS's maximum gives."""
    for hidden, compute_s in cases:
        cost = fitted_s_per_gb(hidden, compute_s)
        about = {"hidden": hidden, "compute_s": compute_s, "server_s_per_gb": cost}
        for system in SERVERS:
            for count in workers:
                yield simulate("peaks", system, workers=count, **about)  # type: ignore[arg-type]


def pairs_of(counted: str, servers: int, workers: int) -> int:
    """The number of pairs of connections that disturb each other: those of one server, or all."""
    connections = workers if counted == OF_A_SERVER else servers * workers
    return connections * (connections - 1)


def contended(
    counted: str,
    hidden: int,
    compute_s: float,
    pair_s: float,
    workers: Sequence[int] = WORKERS,
    *,
    systems: Sequence[str] = tuple(SERVERS),
    study: str | None = None,
) -> Iterator[Throughput]:
    """Simulate servers to which every pair of connections costs ``pair_s`` more in each step.

    Threads that share a processor, or flows that share a switch, cost each other time: coherency,
    in Gunther's Universal Scalability Law, which makes peaks where contention alone makes plateaus.
    c is fitted anew to 1PS's maximum. ``study`` is its name, ``counted`` by default.
    """
    profile = mlp_profile(hidden)
    gigabytes = 4e-9 * sum(a.rows * a.row_elems for a in profile.arrays)

    def cost(system: str, count: int, byte_cost: float) -> float:
        """The busiest server's seconds for each GB that it receives or sends."""
        servers = SERVERS[system]
        busiest = 2 * count * largest_share(hidden, servers) * gigabytes
        return byte_cost + pair_s * pairs_of(counted, servers, count) / busiest

    at, images_per_s = PUBLISHED["1ps"]
    about = {"hidden": hidden, "compute_s": compute_s}

    def step_s(byte_cost: float) -> float:
        slow = cost("1ps", at, byte_cost)
        point = simulate("fit", "1ps", workers=at, server_s_per_gb=slow, **about)  # type: ignore[arg-type]
        return point.step_s

    byte_cost = fitted(step_s, at * BATCH / images_per_s, first=(1.0, 5.0), within=_FITTED_TO)
    for system in systems:
        for count in workers:
            slow = cost(system, count, byte_cost)
            yield simulate(
                study or counted,
                system,
                workers=count,
                server_s_per_gb=slow,
                **about,  # type: ignore[arg-type]
            )


def tried(
    workers: Sequence[int] = WORKERS, compute_s: Sequence[float] = TRIED_S
) -> Iterator[Throughput]:
    """1PS and 2PS with 256 hidden units: which compute and cost of a pair have both peaks."""
    for counted, seconds, share in itertools.product(
        (OF_A_SERVER, OF_ALL), compute_s, TRIED_SHARES
    ):
        about = (counted, 256, seconds, seconds / share, workers)
        yield from contended(*about, systems=("1ps", "2ps"), study=f"{counted}, 1/{share}")


def trade_offs(workers: Sequence[int] = (2, 4, 7)) -> Iterator[Throughput]:
    """Congestion against computation on one server, at 100 Mbit/s: more batches, or codecs.

    A batch takes 50 ms. Adding up k batches sends 1/k of the bytes per image, and changes the
    training: it becomes one with k times the batch. A codec's computation is `core.codecfacts`'.
    """
    for count in workers:
        common = {"workers": count, "rate_bits_per_s": 100e6, "compute_s": 0.05}
        for batches in _TIMES:
            yield simulate("batches", "1ps", batches=batches, **common)  # type: ignore[arg-type]
        for codec in _CODECS:
            yield simulate("codecs", "1ps", codec=codec, preset="p3", **common)  # type: ignore[arg-type]


def main(out: str, workers: str = "2,3,4,5,6,7") -> list[Throughput]:
    """Write processors.json; print the simulated beside the published figures."""
    folder = writable(Path(out))
    counts = [int(count) for count in workers.split(",")]
    found = []
    makes = [contended(*case, workers=counts) for case in CONTENDED]
    makes = [peaks(counts), *makes, trade_offs([n for n in (2, 4, 7) if n in counts])]
    makes.append(tried(counts))
    for point in itertools.chain.from_iterable(makes):
        found.append(point)
        print(
            f"{point.study} {point.system} hidden {point.hidden}, {point.workers} workers,"
            f" {point.server_s_per_gb:.2f} s/GB, {point.batches} batches, {point.codec}:"
            f" {point.images_per_s:,.0f} images/s",
            flush=True,
        )
    write_records(folder / "processors.json", found)
    for line in (*summary(found), "", *contended_summary(found), "", *tried_summary(found)):
        print(line)
    return found


def summary(found: Sequence[Throughput]) -> Iterator[str]:
    """Each system's most images/s, and the fewest workers that reach 98 % of it."""
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


def contended_summary(found: Sequence[Throughput]) -> Iterator[str]:
    """The images/s by workers, and where they are most, by connections and units."""
    yield "| disturb each other | hidden | system | images/s by workers | most with | published |"
    yield "|---|---|---|---|---|---|"
    curves: dict[tuple[str, int, str], list[Throughput]] = {}
    for point in found:
        if point.study in (OF_A_SERVER, OF_ALL):
            place = (point.study, point.hidden, point.system)
            curves.setdefault(place, []).append(point)
    for (counted, hidden, system), points in curves.items():
        most = max(points, key=lambda point: point.images_per_s)
        shown = ", ".join(f"{point.images_per_s:,.0f}" for point in points)
        at, published = PUBLISHED.get(system, ("", 0))
        where = f"{most.workers} | {at}: {published:,}" if published else f"{most.workers} |"
        yield f"| {counted} | {hidden} | `{system}` | {shown} | {where} |"


def tried_summary(found: Sequence[Throughput]) -> Iterator[str]:
    """The workers with which 1PS and 2PS have most images/s, by compute and cost of a pair."""
    yield "| disturb each other, a pair's part | compute | 1PS most with | 2PS most with |"
    yield "|---|---|---|---|"
    cases: dict[tuple[str, float], dict[str, list[Throughput]]] = {}
    for point in found:
        if ", 1/" in point.study:
            by_system = cases.setdefault((point.study, point.compute_s), {})
            by_system.setdefault(point.system, []).append(point)
    for (study, compute_s), by_system in cases.items():
        most = [max(points, key=lambda point: point.images_per_s) for points in by_system.values()]
        shown = " | ".join(f"{point.workers} ({point.images_per_s:,.0f})" for point in most)
        yield f"| {study} | {1e3 * compute_s:g} ms | {shown} |"


def _case(point: Throughput) -> tuple[int, float, float]:
    return point.hidden, point.compute_s, point.server_s_per_gb


if __name__ == "__main__":
    main(*sys.argv[1:])
