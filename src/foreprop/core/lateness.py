"""Who is late, by how much, and why: from the times at which pushes arrive at the servers.

Theory of operation. Steps are counted in windows of `PACE_STEPS`. In each, a server notes when
every worker's push of a slice came (`ArrivalLog`), by its own clock, so that no two clocks are
compared. Workers tell how long their steps took, and how much of that they were busy themselves
(`Pace`). What a server has noted and been told goes to every worker (`WindowReport`), and each of
them comes to the same conclusion (`StragglerWatch`).

A rank is late if its pushes come well after the median rank's. Is it busy for longer than the
median rank by about as much, then it is its compute. If not, its gradients were ready in time, and
it is its link. A server is late if its slices wait for their updates for longer than the others'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from foreprop.core.frames import PACE_STEPS

_RATIO = 2.0
"""Whoever is named is late by so many times as much as the next one."""
_COMPUTE_SHARE = 0.5
"""Of what a rank is late, if it is due to its compute."""


class Bar(NamedTuple):
    """What it takes to be called late."""

    least_share: float
    """Of a step."""
    least_s: float
    """Less is how processes take turns on a busy machine."""
    windows: int
    """In a row, until it is called so, or no more."""


NAMED = Bar(0.2, 0.01, 4)
"""To be named: 32 steps."""
SUSPECTED = Bar(0.05, 0.005, 2)
"""To have its link looked at."""

Cause = Literal["compute", "link", "server"]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds up the others."""

    rank: int | None
    """None: of a dedicated server, which stands beside no rank."""
    late_s: float
    """In each step: how much later than the median rank's its pushes arrive, on average; of a
    server, how much longer than at the median server a slice waits for its update."""
    since_step: int
    cause: Cause
    """compute: its process computes, loads data or the like for longer; link: its gradients are
    ready in time and arrive late; server: its node's server is slow."""
    server: int | None = None
    """Which one, if it is a server."""

    def __str__(self) -> str:
        who = f"server {self.server}" if self.server is not None else ""
        if self.rank is not None:
            who = f"rank {self.rank}" + (f" ({who})" if who else "")
        return f"{who} is late by {self.late_s * 1e3:.0f} ms per step: its {self.cause}"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last window: means of its steps, seconds."""

    step_s: float
    busy_s: float
    """Of it, what the worker did not wait for others."""
    order: tuple[int, ...] | None = None
    """Rank 0's new order of first use (`core.useorder`), if it has changed for good."""
    measure: bool = False
    """Rank 0's: all are to measure their links (`core.linkwatch`)."""
    norm: bool = False
    """Its loop has asked for the norm of gradients, in this window."""


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has noted in a window, and all workers' paces by rank."""

    slices: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """Pushed by all, so often in the window."""
    late_s: tuple[float, ...]
    """By rank: the mean of these pushes' times after the median rank's; negative if before."""
    answer_s: float
    """From the last push of a slice to its update, on average."""
    paces: tuple[Pace, ...]


class ArrivalLog:
    """A server's: when pushes come. Not thread-safe; times are seconds of any one clock."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._begun: dict[int, tuple[int, dict[int, float]]] = {}  # by slice: step, times by rank
        self._full_s: dict[int, float] = {}  # by slice: when the last push came
        self._clear()

    def _clear(self) -> None:
        self._late_s = [0.0] * self._ranks
        self._slices = 0
        self._answer_s = 0.0
        self._answers = 0

    def arrived(self, rank: int, slice_: int, step: int, at_s: float) -> None:
        """A push is in. What had begun before the log did, or was given up, does not count."""
        begun = self._begun.get(slice_)
        if begun is None or begun[0] != step or rank in begun[1]:
            begun = self._begun[slice_] = (step, {})
        times_s = begun[1]
        times_s[rank] = at_s
        if len(times_s) < self._ranks:
            return
        del self._begun[slice_]
        median_s = lower_median(list(times_s.values()))
        for each, time_s in times_s.items():
            self._late_s[each] += time_s - median_s
        self._slices += 1
        self._full_s[slice_] = at_s

    def updated(self, slice_: int, at_s: float) -> None:
        full_s = self._full_s.pop(slice_, None)
        if full_s is not None:
            self._answer_s += at_s - full_s
            self._answers += 1

    def report(self, paces: Sequence[Pace]) -> WindowReport:
        """Of the window that ends; the next one begins."""
        count = max(1, self._slices)
        made = WindowReport(
            slices=self._slices,
            late_s=tuple(late_s / count for late_s in self._late_s),
            answer_s=self._answer_s / max(1, self._answers),
            paces=tuple(paces),
        )
        self._clear()
        return made


class StragglerWatch:
    """A worker's conclusion from all servers' reports. Not thread-safe.

    ``server_ranks``: by server, the first rank on its node, or None of a dedicated one. Steps are
    named by their number in the session, which has made ``steps_before`` the first window.
    ``links``: whether pushes pass any; without, none is named.
    """

    def __init__(
        self, server_ranks: Sequence[int | None], *, steps_before: int = 0, links: bool = True
    ) -> None:
        self._steps_before = steps_before
        self._links = links
        self._named, self._suspected = _Verdict(NAMED), _Verdict(SUSPECTED)
        self._server_ranks = server_ranks
        self._reports: defaultdict[int, dict[int, WindowReport]] = defaultdict(
            dict
        )  # by window, server

    @property
    def straggler(self) -> Straggler | None:
        return self._named.straggler

    @property
    def suspect(self) -> Straggler | None:
        """Who is late by less already, or for less long."""
        return self._suspected.straggler

    def heard(self, server: int, window: int, report: WindowReport) -> bool:
        """A server's report of a window; returns whether who is named, or why, has changed."""
        reports = self._reports[window]
        reports[server] = report
        if len(reports) < len(self._server_ranks):
            return False
        del self._reports[window]
        first_step = self._steps_before + (window - 1) * PACE_STEPS + 1
        changed = False
        for verdict in (self._suspected, self._named):
            found = find_straggler(reports, self._server_ranks, first_step, verdict.bar)
            if found is not None and found.cause == "link" and not self._links:
                found = None  # processes that take turns on one machine
            changed = verdict.conclude(found)
        return changed


class _Verdict:
    """By one bar: who is late, if windows in a row agree."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.straggler: Straggler | None = None
        self._candidate: Straggler | None = None
        self._seen = 0  # the candidate, in so many windows in a row

    def conclude(self, found: Straggler | None) -> bool:
        """What one window says; returns whether the straggler has changed."""
        before = self.straggler
        if _same(found, self._candidate):
            self._seen += 1
            if found is not None and self._candidate is not None:
                since_step = self._candidate.since_step
                found = msgspec.structs.replace(found, since_step=since_step)
        else:
            self._seen = 1
        self._candidate = found
        if self._seen >= self.bar.windows:
            self.straggler = found
        return not _same(before, self.straggler)


def _same(one: Straggler | None, other: Straggler | None) -> bool:
    """Whether it is the same one for the same cause."""
    if one is None or other is None:
        return one is other
    return (one.rank, one.cause, one.server) == (other.rank, other.cause, other.server)


def find_straggler(
    reports: dict[int, WindowReport],
    server_ranks: Sequence[int | None],
    first_step: int,
    bar: Bar = NAMED,
) -> Straggler | None:
    """By one window's reports, by server; pure."""
    total = sum(report.slices for report in reports.values())
    paces = next(iter(reports.values())).paces
    if not total or min(pace.step_s for pace in paces) <= 0:  # or nothing is measured yet
        return None
    least_s = max(bar.least_s, bar.least_share * lower_median([pace.step_s for pace in paces]))
    late_s = [
        sum(report.slices * report.late_s[rank] for report in reports.values()) / total
        for rank in range(len(paces))
    ]
    worst, by_s = _outstanding(late_s)
    answers = {server: report.answer_s for server, report in reports.items() if report.slices}
    servers = sorted(answers)
    usual_s = lower_median(list(answers.values()))
    place, behind_s = _outstanding([answers[server] - usual_s for server in servers])
    if max(by_s, behind_s) < least_s:
        return None
    if behind_s > by_s:
        server = servers[place]
        rank = server_ranks[server]
        return Straggler(
            rank=rank, late_s=behind_s, since_step=first_step, cause="server", server=server
        )
    excess_s = paces[worst].busy_s - lower_median([pace.busy_s for pace in paces])
    cause: Cause = "compute" if excess_s >= _COMPUTE_SHARE * by_s else "link"
    return Straggler(rank=worst, late_s=by_s, since_step=first_step, cause=cause)


def _outstanding(values: Sequence[float]) -> tuple[int, float]:
    """The place of the largest one, and that; 0 instead if others are nearly as large."""
    worst = max(range(len(values)), key=lambda place: values[place])
    next_largest = max((v for place, v in enumerate(values) if place != worst), default=0.0)
    stands_out = len(values) > 1 and values[worst] > _RATIO * max(0.0, next_largest)
    return worst, values[worst] if stands_out else 0.0


def lower_median(values: Sequence[float]) -> float:
    """The middle one, of two the smaller: one that is late never moves it."""
    return sorted(values)[(len(values) - 1) // 2]
