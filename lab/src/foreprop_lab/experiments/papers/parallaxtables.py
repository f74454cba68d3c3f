"""Parallax's published figures, the simulated ones, and tables with both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

PS, MPI, HYBRID, FORWARD, HOROVOD = "ps", "mpi", "hybrid", "p3", "horovod"
SYSTEM = {
    PS: "tensorflow",
    MPI: "ddp-sparse",
    HYBRID: "hybrid",
    FORWARD: "p3",
    HOROVOD: "ddp-sparse",
}
"""The simulator's name of each system.

``horovod`` is ``mpi`` as it was in 2018: lists of rows that are not added up before, and a
processor's time for each gathered byte.
"""
NORMALISED: Mapping[str, float] = {"LM": 9.4, "NMT": 17.1, "ResNet-50": 39.8, "InceptionV3": 43.6}
"""Parallax's throughput on 48 workers over one worker's (section 7.3)."""
TABLE_4: Mapping[str, Sequence[float]] = {"LM": (101, 112, 251, 276), "NMT": (87, 117, 188, 191)}
"""Thousands of words/s on 48 workers: all by servers, with hybrid communication, with local
aggregation, and with operations placed, too."""
HOROVOD_SLOWER = 6.3
"""How many times as long as Parallax Horovod takes for LM (section 7.2), on 36 workers."""
HOROVOD_WORKERS = 36
HOROVOD_SLOWER_LATER = 6.02
"""The same on 48, in the paper's third version (arXiv:1808.02621v3, abstract)."""
DENSE_PS_SLOWER = 1.4
"""How many times as long as Parallax TensorFlow's servers take for ResNet-50 (section 7.2)."""
ABLATION = ((PS, False), (HYBRID, False), (HYBRID, True))
"""Table 4's steps: the system, and whether machines aggregate."""
PUBLISHED_WORKERS = 48
"""The number of workers in all these figures."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one simulation."""

    model: str
    system: str
    local_aggregation: bool
    machines: int
    workers: int
    dense_s_per_gb: float
    row_s_per_gb: float
    """The time of a server's processor for what it receives or sends."""
    gathered_s_per_gb: float = 0.0
    """The time of a worker's processor for others' rows that it gathers."""
    step_s: float
    throughput: float
    """The throughput of all workers, in ``unit``/s."""
    unit: str
    normalised: float
    """The throughput over one worker's."""

    @property
    def label(self) -> str:
        return f"{self.model}, {self.system}{'' if self.local_aggregation else ', no relays'}"


def read_points(path: Path) -> list[Point]:
    """The points in the file; none if there is no file."""
    if not path.exists():
        return []
    return msgspec.json.decode(path.read_bytes(), type=list[Point])


def merged(before: Sequence[Point], new: Sequence[Point]) -> list[Point]:
    """The new points, and the earlier ones that none of them replaces."""
    made = {_place(point) for point in new}
    return [*(point for point in before if _place(point) not in made), *new]


def _place(point: Point) -> tuple[str, str, bool, int]:
    return point.model, point.system, point.local_aggregation, point.machines


def maybe_largest(
    points: Sequence[Point], model: str, system: str, *, relays: bool
) -> Point | None:
    """The point with the most machines."""
    wanted = (model, system, relays)
    same = [p for p in points if (p.model, p.system, p.local_aggregation) == wanted]
    return max(same, key=lambda point: point.machines, default=None)


def curve(points: Sequence[Point], model: str, system: str) -> list[Point]:
    """The points of a model and system by machines; TensorFlow's workers have no relays."""
    relays = system != PS
    wanted = (model, system, relays)
    same = [p for p in points if (p.model, p.system, p.local_aggregation) == wanted]
    return sorted(same, key=lambda point: point.machines)


def table_1(sizes: Mapping[str, tuple[int, int, float]], points: Sequence[Point]) -> Iterator[str]:
    """Model, dense and sparse elements, alpha, and throughput, in Markdown.

    ``sizes`` has each model's dense elements, sparse elements and alpha.
    """
    yield "| model | dense elements | sparse | alpha | `ps` | `mpi` | `horovod` | `hybrid` | `p3` |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, (dense, sparse, alpha) in sizes.items():
        shown = []
        for system in (PS, MPI, HOROVOD, HYBRID, FORWARD):
            found = maybe_largest(points, name, system, relays=system != PS)
            shown.append("" if found is None else f"{found.throughput:,.0f} {found.unit}/s")
        elems = f"{dense / 1e6:.1f} M | {sparse / 1e6:.1f} M"
        yield f"| {name} | {elems} | {alpha:.2f} | {' | '.join(shown)} |"


def table_4(points: Sequence[Point]) -> Iterator[str]:
    """The gains of hybrid communication and local aggregation, beside the published ones."""
    yield "| model | `ps`, no relays | + hybrid | + local aggregation |"
    yield "|---|---|---|---|"
    for name, published in TABLE_4.items():
        found = [maybe_largest(points, name, system, relays=relays) for system, relays in ABLATION]
        if None in found:
            continue
        base = found[0]
        shown = [
            f"{point.throughput / base.throughput:.2f} ({own / published[0]:.2f})"
            for point, own in zip(found, published, strict=False)
            if point is not None and base is not None
        ]
        yield f"| {name} | {' | '.join(shown)} |"


def published_throughput(model: str) -> dict[str, float]:
    """Each system's throughput on 48 workers, in the model's unit/s."""
    if model not in TABLE_4:
        return {}
    thousands = TABLE_4[model]
    found = {PS: 1e3 * thousands[0], HYBRID: 1e3 * thousands[-1]}
    if model == "LM":
        found[HOROVOD] = found[HYBRID] / HOROVOD_SLOWER_LATER
    return found
