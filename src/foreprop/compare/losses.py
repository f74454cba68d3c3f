"""Whether two systems have the same losses, step by step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Losses = Sequence[float | None]
"""Of one rank, by step; None is not a number."""

AGREE = 0.01
"""Losses that nowhere differ by more than this share of the usual loss."""
_OTHER_DRAW = 1e-4
"""The first loss comes before the first update: systems cannot differ in it by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of some ranks' losses from others, in shares of the usual loss."""

    largest: float
    first_step: int | None
    """Where the first one is that differs at all, from 1; None: nowhere."""
    in_first_loss: float

    @property
    def is_other_draw(self) -> bool:
        """Whether the runs had other data, or other random numbers."""
        return self.in_first_loss > _OTHER_DRAW


def difference(found: Sequence[Losses], wanted: Sequence[Losses]) -> Difference | None:
    """Of all ranks; None if there is no step in which both have a loss."""
    if len(found) != len(wanted):
        return None
    usual = _usual(wanted)
    pairs = [
        list(zip(ours, theirs, strict=False)) for ours, theirs in zip(found, wanted, strict=True)
    ]
    if not any(one is not None for rank in pairs for one, _ in rank):
        return None
    by_step = [
        max(_distance(rank[step], usual) for rank in pairs)
        for step in range(min(len(rank) for rank in pairs))
    ]
    if not by_step:
        return None
    first = next((step for step, share in enumerate(by_step, 1) if share > 0), None)
    return Difference(largest=max(by_step), first_step=first, in_first_loss=by_step[0])


def largest(differences: Iterable[Difference | None]) -> Difference | None:
    """The one that differs most; None if there is none at all."""
    known = [found for found in differences if found is not None]
    return max(known, key=lambda found: (found.is_other_draw, found.largest), default=None)


def _usual(losses: Sequence[Losses]) -> float:
    sizes = [abs(loss) for rank in losses for loss in rank if loss is not None]
    return statistics.fmean(sizes) if sizes and any(sizes) else 1.0


def _distance(pair: tuple[float | None, float | None], usual: float) -> float:
    one, other = pair
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other) / usual


def words(found: Difference | None) -> str:
    """For the table."""
    if found is None:
        return "none seen"
    if found.largest == 0:
        return "equal"
    if found.is_other_draw:
        return "other draws"
    share = f"{found.largest:.0e}"
    if found.largest <= AGREE:
        return f"agree ({share})"
    return f"differ ({share}, from step {found.first_step})"
