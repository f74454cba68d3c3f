"""``architecture="auto"`` and embeddings: each goes the way that moves fewer bytes.

In the first steps every rank counts the rows that each embedding's gradient touches. Then all ranks
average their counts, and Parallax's rule (`core.parallax`) decides, alike on every rank.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreprop.cluster.rendezvous import Board
from foreprop.core.manifest import ITEMSIZE_BYTES, ParameterInfo
from foreprop.core.parallax import prefers_servers, traffic
from foreprop.path.managedparameter import Watched

_HEADINGS = ("parameter", "size", "alpha", "choice", "servers", "all-gather", "all-reduce")


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """What was measured of one embedding, and what follows."""

    info: ParameterInfo
    alpha: float
    """The share of its rows that a worker touches in a step, on average."""
    row_wise: bool


class SparsityCount:
    """One rank's count of touched rows, step by step."""

    def __init__(self, parameters: Iterable[Watched]) -> None:
        self._parameters = list(parameters)
        self._shares: dict[str, list[float]] = {p.name: [] for p in self._parameters}
        for parameter in self._parameters:
            parameter.counts_rows = True

    def end_step(self) -> None:
        for parameter in self._parameters:
            rows = max(1, len(parameter.parameter))
            self._shares[parameter.name].append(parameter.touched_rows / rows)

    def end(self) -> dict[str, float]:
        """Stop counting; of each parameter's rows, the mean share that a step touched."""
        for parameter in self._parameters:
            parameter.counts_rows = False
        return {name: statistics.fmean(shares) for name, shares in self._shares.items()}


def agree_on_shares(mine: Mapping[str, float], board: Board) -> dict[str, float]:
    """The mean over all ranks, the same on each."""
    told = board.exchange("shares", json.dumps(mine), "shares of touched rows")
    found = [json.loads(text) for text in told]
    return {name: statistics.fmean(shares[name] for shares in found) for name in mine}


def choose(
    infos: Sequence[ParameterInfo], shares: Mapping[str, float], workers: int
) -> list[RouteChoice]:
    """For every parameter that has been measured."""
    return [
        RouteChoice(info, shares[info.name], prefers_servers(shares[info.name], workers))
        for info in infos
        if info.name in shares
    ]


def describe(choices: Sequence[RouteChoice], workers: int) -> str:
    """A table: parameter, size, alpha, choice, predicted bytes per worker and step."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for choice in choices:
        size_bytes = choice.info.elems * ITEMSIZE_BYTES[choice.info.dtype]
        moved = traffic(size_bytes, choice.alpha, workers)
        way = "servers, by rows" if choice.row_wise else "all-reduce"
        cells = (choice.info.name, _readable(size_bytes), f"{choice.alpha:.4f}", way)
        rows.append((*cells, *map(_readable, moved)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = f"embeddings, with bytes per worker (of {workers}) and step:\n"
    return head + "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _readable(size_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"
