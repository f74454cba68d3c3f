"""What a comparison has found: runs, as they were measured, and a row for each system.

Losses are compared step by step, rank by rank, in shares of the usual loss. The first loss comes
before the first update, so systems cannot differ in it: runs that do had other random numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from foreprop.durable import replace_file
from foreprop.tools.compare.records import RankEnd
from foreprop.tools.compare.systems import ALONE, CONTENDERS, DDP

LEAST_STEPS = 2
"""How many steps a run must have to be counted."""
CPU_BOUND_SHARE = 0.8
"""A machine whose processors are busier is no measure of its network."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and outer deciles of the steps' times, seconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(median=values[0], p10=values[0], p90=values[0])
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(median=statistics.median(values), p10=deciles[0], p90=deciles[-1])


class RankRun(RankEnd, kw_only=True):
    losses: list[float | None] = msgspec.field(default_factory=list)
    seconds: list[float] = msgspec.field(default_factory=list)
    """The times of the steps from the second one on."""


class Run(msgspec.Struct, kw_only=True):
    """One run of the script; ``error`` is empty if it went through."""

    system: str
    round: int
    warm_up: int
    error: str = ""
    about: str = ""
    log: str = ""
    ranks: list[RankRun] = []

    @property
    def step_s(self) -> list[float]:
        counted = [rank.seconds[self.warm_up - 1 :] for rank in self.ranks]
        return [statistics.fmean(values) for values in zip(*counted, strict=False)]

    @property
    def losses(self) -> list[list[float | None]]:
        return [rank.losses for rank in self.ranks]

    @property
    def sent_bytes_per_step(self) -> float | None:
        sent = [rank.sent_bytes for rank in self.ranks if rank.sent_bytes is not None]
        return statistics.fmean(sent) / len(self.step_s) if sent and self.step_s else None

    @property
    def cpu_share(self) -> float:
        return max((rank.cpu_share or 0.0 for rank in self.ranks), default=0.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One system; its times are None if no run of it went through."""

    system: str
    title: str
    error: str = ""
    rounds: int = 0
    steps: int = 0
    """The steps that count, of all rounds."""
    step_s: Spread | None = None
    round_medians_s: list[float] = []
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    """All workers' together, if the samples of a step were given."""
    over_ddp: float | None = None
    """The throughput over DDP's."""
    waiting_share: float | None = None
    """The share of a median step by which it is longer than ``alone``'s."""
    sent_bytes_per_step: float | None = None
    losses: str = ""
    """How the losses compare with the reference's, or the reference's with its first round's."""
    loss_difference: float | None = None


class Comparison(msgspec.Struct, kw_only=True):
    """The whole comparison, as results.json has it."""

    command: str
    workers: int
    machines: int
    steps: int
    warm_up: int
    batch: int | None
    reference: str
    """The system with whose losses the others are compared."""
    versions: dict[str, str]
    notices: list[str]
    rows: list[Row]
    runs: list[Run]


def reference_of(systems: Sequence[str]) -> str:
    """DDP, if it takes part, else the first one that trains; ``alone`` if there is no other."""
    training = [name for name in systems if name != ALONE]
    return DDP if DDP in training else (training or [ALONE])[0]


def rows_of(runs: Sequence[Run], systems: Sequence[str], *, samples: int | None) -> list[Row]:
    """A row for each system; ``samples`` are those of one step of all workers."""
    good = {name: [r for r in runs if r.system == name and not r.error] for name in systems}
    reference = good[reference_of(systems)]
    return [
        _row(
            name,
            good,
            next((run.error for run in runs if run.system == name and run.error), ""),
            None if name == ALONE else _difference(good[name], reference),
            samples,
        )
        for name in systems
    ]


def _row(
    name: str,
    good: dict[str, list[Run]],
    error: str,
    differs: Difference | None,
    samples: int | None,
) -> Row:
    runs = good[name]
    if not runs:
        return Row(system=name, title=CONTENDERS[name].title, error=error)
    step_s = _step_s(runs)
    sent = [run.sent_bytes_per_step for run in runs if run.sent_bytes_per_step is not None]
    per_s = 1 / statistics.fmean(step_s)
    ddp_s, alone_s = _step_s(good.get(DDP, [])), _step_s(good.get(ALONE, []))
    waiting = None
    if name != ALONE and alone_s:
        waiting = max(0.0, 1 - statistics.median(alone_s) / statistics.median(step_s))
    return Row(
        system=name,
        title=CONTENDERS[name].title,
        error=error,
        rounds=len(runs),
        steps=len(step_s),
        step_s=Spread.of(step_s),
        round_medians_s=[statistics.median(run.step_s) for run in runs],
        steps_per_s=per_s,
        samples_per_s=None if samples is None else samples * per_s,
        over_ddp=statistics.fmean(ddp_s) * per_s if ddp_s else None,
        waiting_share=waiting,
        sent_bytes_per_step=statistics.fmean(sent) if sent else None,
        losses="not compared" if name == ALONE else losses_text(differs),
        loss_difference=None if differs is None else differs.largest,
    )


def _step_s(runs: Sequence[Run]) -> list[float]:
    return [seconds for run in runs for seconds in run.step_s]


def _difference(runs: Sequence[Run], reference: Sequence[Run]) -> Difference | None:
    """The largest difference from the reference, round by round.

    The reference itself is compared with its first round.
    """
    is_reference = runs is reference
    wanted = {run.round: reference[0] if is_reference else run for run in reference}
    return largest_of(
        difference_of(run.losses, wanted[run.round].losses) for run in runs if run.round in wanted
    )


def draws_differ(runs: Sequence[Run]) -> bool:
    trained = [run for run in runs if not run.error and run.system != ALONE]
    found = (difference_of(run.losses, trained[0].losses) for run in trained)
    return any(one is not None and one.is_other_draw for one in found)


def write_records(path: Path, records: Sequence[msgspec.Struct] | msgspec.Struct) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")


Losses = Sequence[float | None]
"""One rank's losses by step; None is not a number."""

AGREE = 0.01
"""Losses agree if they nowhere differ by more than this share of the usual loss."""
_OTHER_DRAW = 1e-4
"""First losses that differ by more than this share come of other random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far the ranks' losses in two runs are apart, in shares of the usual loss."""

    largest: float
    first_step: int | None
    """The first step whose losses differ at all, from 1; None if they are equal."""
    in_first_loss: float

    @property
    def is_other_draw(self) -> bool:
        return self.in_first_loss > _OTHER_DRAW


def difference_of(found: Sequence[Losses], wanted: Sequence[Losses]) -> Difference | None:
    """Compare all ranks; None if there is no step in which both have a loss."""
    if len(found) != len(wanted):
        return None
    sizes = [abs(loss) for rank in wanted for loss in rank if loss is not None]
    usual = statistics.fmean(sizes) if sizes and any(sizes) else 1.0
    pairs = [
        list(zip(ours, theirs, strict=False)) for ours, theirs in zip(found, wanted, strict=True)
    ]
    if not any(one is not None for rank in pairs for one, _ in rank):
        return None

    def distance(one: float | None, other: float | None) -> float:
        if one is None or other is None:
            return 0.0 if one is other else math.inf
        return abs(one - other) / usual

    by_step = [
        max(distance(*rank[step]) for rank in pairs)
        for step in range(min(len(rank) for rank in pairs))
    ]
    if not by_step:
        return None
    first = next((step for step, share in enumerate(by_step, 1) if share > 0), None)
    return Difference(largest=max(by_step), first_step=first, in_first_loss=by_step[0])


def largest_of(differences: Iterable[Difference | None]) -> Difference | None:
    known = [found for found in differences if found is not None]
    return max(known, key=lambda found: (found.is_other_draw, found.largest), default=None)


def losses_text(found: Difference | None) -> str:
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
