"""Which embeddings go by rows: those for which `core.parallax` says so, and a table about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreprop.core.manifest import ITEMSIZE_BYTES, ParameterInfo, WireDtype, wire_dtype_of
from foreprop.core.parallax import Topology, Traffic, prefers_servers, traffic
from foreprop.quantities import counted

_HEADINGS = ("parameter", "size", "alpha", "choice", "servers", "all-gather", "all-reduce")


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """What was measured of one embedding, and what follows."""

    info: ParameterInfo
    alpha: float
    """The share of its rows that a worker touches in a step, on average."""
    moved: Traffic
    """Bytes that would pass the busiest link, each way."""
    row_wise: bool


def choose_routes(
    infos: Sequence[ParameterInfo],
    shares: Mapping[str, float],
    topology: Topology,
    wire_dtype: WireDtype | None = None,
) -> list[RouteChoice]:
    """For every parameter that has been measured."""
    choices = []
    for info in infos:
        if info.name in shares:
            alpha = shares[info.name]
            size_bytes = info.elems * ITEMSIZE_BYTES[wire_dtype_of(info.dtype, wire_dtype)]
            row_bytes = max(1.0, size_bytes / max(1, info.shape[0]))
            moved = traffic(size_bytes, row_bytes, alpha, topology)
            row_wise = prefers_servers(row_bytes, alpha, topology)
            choices.append(RouteChoice(info, alpha, moved, row_wise))
    return choices


def describe_routes(choices: Sequence[RouteChoice], topology: Topology) -> str:
    """A table: parameter, size, alpha, choice, predicted bytes of the busiest link and step."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for choice in choices:
        size_bytes = choice.info.elems * ITEMSIZE_BYTES[choice.info.dtype]
        way = "servers, by rows" if choice.row_wise else "all-reduce"
        cells = (choice.info.name, _readable(size_bytes), f"{choice.alpha:.4f}", way)
        rows.append((*cells, *map(_readable, choice.moved)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = (
        f"embeddings, with bytes per step over the busiest link, each way"
        f" ({counted(topology.workers, 'worker')}):\n"
    )
    return head + "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _readable(size_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"
