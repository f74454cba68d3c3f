"""What a comparison has found: runs, as they were measured, and a row for each system."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from foreprop.compare import losses
from foreprop.compare.systems import ALONE, CONTENDERS, DDP
from foreprop.workload.records import Spread

LEAST_STEPS = 2
"""That a run must have to be counted."""


class RankRun(msgspec.Struct, kw_only=True):
    """One rank of one run."""

    losses: list[float | None] = []
    seconds: list[float] = []
    """Of each step from the second one on."""
    steps: int = 0
    is_ready: bool = False
    digest: str = ""
    interface: str = ""
    sent_bytes: int | None = None
    waited_s: float | None = None
    cpu_share: float | None = None


class Run(msgspec.Struct, kw_only=True):
    """One run of the script. ``error`` is empty if it went through."""

    system: str
    round: int
    warm_up: int
    error: str = ""
    about: str = ""
    log: str = ""
    ranks: list[RankRun] = []

    @property
    def step_s(self) -> list[float]:
        """Of each step that counts the mean over the ranks."""
        counted = [rank.seconds[self.warm_up - 1 :] for rank in self.ranks]
        return [statistics.fmean(values) for values in zip(*counted, strict=False)]

    @property
    def losses(self) -> list[list[float | None]]:
        return [rank.losses for rank in self.ranks]

    @property
    def sent_bytes_per_step(self) -> float | None:
        """That a machine sends, mean over the machines."""
        sent = [rank.sent_bytes for rank in self.ranks if rank.sent_bytes is not None]
        return statistics.fmean(sent) / len(self.step_s) if sent and self.step_s else None

    @property
    def cpu_share(self) -> float:
        """Of the machine whose processors were busiest."""
        return max((rank.cpu_share or 0.0 for rank in self.ranks), default=0.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One system. Times are None if no run of it went through."""

    system: str
    title: str
    error: str = ""
    rounds: int = 0
    steps: int = 0
    """That count, of all rounds."""
    step_s: Spread | None = None
    round_medians_s: list[float] = []
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    """Of all workers, if the samples of a step were given."""
    over_ddp: float | None = None
    """Throughput over DDP's."""
    waiting_share: float | None = None
    """Of a median step, what it takes over ``alone``'s."""
    sent_bytes_per_step: float | None = None
    losses: str = ""
    """Beside the reference's; of the reference itself, beside its first round."""
    loss_difference: float | None = None


class Comparison(msgspec.Struct, kw_only=True):
    """All of it, as results.json has it."""

    command: str
    workers: int
    machines: int
    steps: int
    warm_up: int
    batch: int | None
    reference: str
    """Whose losses the others are compared with."""
    versions: dict[str, str]
    notices: list[str]
    rows: list[Row]
    runs: list[Run]


def reference_of(systems: Sequence[str]) -> str:
    """DDP, if it takes part, else the first one that trains; ``alone`` if there is no other."""
    training = [name for name in systems if name != ALONE]
    return DDP if DDP in training else (training or [ALONE])[0]


def rows_of(runs: Sequence[Run], systems: Sequence[str], *, samples: int | None) -> list[Row]:
    """``samples``: of one step of all workers."""
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
    differs: losses.Difference | None,
    samples: int | None,
) -> Row:
    runs = good[name]
    if not runs:
        return Row(system=name, title=CONTENDERS[name].title, error=error)
    step_s = [seconds for run in runs for seconds in run.step_s]
    sent = [run.sent_bytes_per_step for run in runs if run.sent_bytes_per_step is not None]
    per_s = 1 / statistics.fmean(step_s)
    ddp_s = _mean_s(good.get(DDP, []))
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
        over_ddp=None if ddp_s is None else ddp_s * per_s,
        waiting_share=_waiting(name, good),
        sent_bytes_per_step=statistics.fmean(sent) if sent else None,
        losses="not compared" if name == ALONE else losses.words(differs),
        loss_difference=None if differs is None else differs.largest,
    )


def _mean_s(runs: Sequence[Run]) -> float | None:
    step_s = [seconds for run in runs for seconds in run.step_s]
    return statistics.fmean(step_s) if step_s else None


def _median_s(runs: Sequence[Run]) -> float | None:
    step_s = [seconds for run in runs for seconds in run.step_s]
    return statistics.median(step_s) if step_s else None


def _waiting(name: str, good: dict[str, list[Run]]) -> float | None:
    alone_s, own_s = _median_s(good.get(ALONE, [])), _median_s(good[name])
    if name == ALONE or alone_s is None or own_s is None:
        return None
    return max(0.0, 1 - alone_s / own_s)


def _difference(runs: Sequence[Run], reference: Sequence[Run]) -> losses.Difference | None:
    """Round by round; of the reference itself from its first round."""
    is_reference = runs is reference
    wanted = {run.round: reference[0] if is_reference else run for run in reference}
    return losses.largest(
        losses.difference(run.losses, wanted[run.round].losses)
        for run in runs
        if run.round in wanted
    )


def draws_differ(runs: Sequence[Run]) -> bool:
    """Whether the script begins with another loss each time it is run."""
    trained = [run for run in runs if not run.error and run.system != ALONE]
    found = (losses.difference(run.losses, trained[0].losses) for run in trained)
    return any(one is not None and one.is_other_draw for one in found)
