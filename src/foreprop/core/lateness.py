"""Which rank or server is late, by how much, and why: from the times at which pushes arrive.

Theory of operation. Steps are counted in windows of `PACE_STEPS`. In each window a server notes
when every worker's push of a slice came (`ArrivalLog`), by its own clock: no two clocks are ever
compared. Workers report how long their steps took, and how much of that they were busy (`Pace`).
Servers send what they have noted, and all paces, to every worker (`WindowReport`), and each worker
comes to the same conclusion (`StragglerWatch`).

A rank is late if its pushes come well after the median rank's. If it was busy for longer than the
median rank by about as much, the cause is its compute. Otherwise its gradients were ready in time,
and the cause is its link. A server is late if its slices wait for updates longer than the others'.

With staleness s a rank that is late in each step falls behind until it is s steps behind. So its
lateness is divided by s + 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec

from foreprop.core.frames import PACE_STEPS

_RATIO = 2.0  # a straggler is late by so many times as much as the next one
_COMPUTE_SHARE = 0.5  # the share of a rank's lateness that its compute must explain to be the cause


class Bar(NamedTuple):
    """How late one must be, and for how many ``windows`` in a row, to be called so, or no more.

    ``least_share`` is of a step. Less than ``least_s`` is how processes take turns on a busy
    machine.
    """

    least_share: float
    least_s: float
    windows: int


NAMED = Bar(0.2, 0.01, 4)
"""The bar for being named, after 32 steps."""
SUSPECTED = Bar(0.05, 0.005, 2)
"""The bar for having one's link looked at."""

Cause = Literal["compute", "link", "server"]


def windows_apart(steps: int) -> int:
    """How many windows later all ranks have ended one, if they are at most so many steps apart."""
    return steps // PACE_STEPS + 1


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank, or the ``server``, that holds up the others; a dedicated server has no rank."""

    rank: int | None
    late_s: float
    """How much later than the median rank's its pushes arrive in each step, on average; for a
    server, how much longer than at the median server a slice waits for its update."""
    since_step: int
    cause: Cause
    """compute: its process computes, loads data or the like for longer; link: its gradients are
    ready in time and arrive late; server: its node's server is slow."""
    server: int | None = None

    def __str__(self) -> str:
        who = f"server {self.server}" if self.server is not None else ""
        if self.rank is not None:
            who = f"rank {self.rank}" + (f" ({who})" if who else "")
        return f"{who} is late by {self.late_s * 1e3:.0f} ms per step: its {self.cause}"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reports of its last window; times are means of its steps.

    For ``busy_s`` of a step the worker did not wait for others.
    """

    step_s: float
    busy_s: float
    order: tuple[int, ...] | None = None
    """Rank 0's new order of first use (`session.useorder`), if it has changed for good."""
    measure: bool = False
    """Rank 0 asks all to measure their links (`core.linkshares`)."""
    norm: bool = False
    """The loop has asked for the norm of gradients in this window."""


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has noted in a window, and all workers' paces by rank."""

    slices: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """How many slices, counted in each step, all ranks have pushed."""
    late_s: tuple[float, ...]
    """How long after the median rank each rank's pushes came, on average; negative if before."""
    answer_s: float
    """The time from the last push of a slice to its update, on average."""
    paces: tuple[Pace, ...]


class ArrivalLog:
    """A server's log of when pushes come, of ranks that may be so many steps ``apart``.

    Not thread-safe; times are seconds of any one clock.
    """

    def __init__(self, ranks: int, apart: int = 0) -> None:
        self._ranks = ranks
        self._steps = 1 + apart
        self._open: dict[int, dict[int, dict[int, float]]] = {}  # by slice, step and rank
        self._full_s: dict[int, float] = {}  # by slice: when the last push came
        self._clear()

    def _clear(self) -> None:
        self._late_s = [0.0] * self._ranks
        self._slices = 0
        self._answer_s = 0.0
        self._answers = 0

    def arrived(self, rank: int, slice_: int, step: int, at_s: float) -> None:
        """Note a push. Steps that began before the log did, or were given up, do not count."""
        open_ = self._open.setdefault(slice_, {})
        if step not in open_ or rank in open_[step]:
            open_[step] = {}
            if len(open_) > self._steps:
                del open_[min(open_)]
        times_s = open_.get(step, {})
        times_s[rank] = at_s
        if len(times_s) < self._ranks:
            return
        del open_[step]
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
        """What the window that ends has shown; the next window begins."""
        count = max(1, self._slices) * self._steps
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

    ``server_ranks`` has by server the first rank on its node, or None for a dedicated one. The
    session has made ``steps_before`` the first window, whose numbers go on. Without ``links`` that
    pushes pass, none is named.
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
        """Like `straggler`, of one that is late by less, or for less long."""
        return self._suspected.straggler

    def heard(self, server: int, window: int, report: WindowReport) -> bool:
        """Note a server's report; returns whether the straggler, or the cause, has changed."""
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


@dataclass(slots=True, eq=False)
class _Verdict:
    """The straggler by one bar, for which enough windows in a row must agree."""

    bar: Bar
    straggler: Straggler | None = None
    _candidate: Straggler | None = None
    _seen: int = 0  # the candidate, in so many windows in a row

    def conclude(self, found: Straggler | None) -> bool:
        """Note what one window says; returns whether the straggler has changed."""
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
    if one is None or other is None:
        return one is other
    return (one.rank, one.cause, one.server) == (other.rank, other.cause, other.server)


def find_straggler(
    reports: dict[int, WindowReport],
    server_ranks: Sequence[int | None],
    first_step: int,
    bar: Bar = NAMED,
) -> Straggler | None:
    """The straggler by one window's reports, which are by server."""
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
    """The place of the largest value, and the value, or 0 if another one is nearly as large."""
    worst = max(range(len(values)), key=lambda place: values[place])
    next_largest = max((v for place, v in enumerate(values) if place != worst), default=0.0)
    stands_out = len(values) > 1 and values[worst] > _RATIO * max(0.0, next_largest)
    return worst, values[worst] if stands_out else 0.0


def lower_median(values: Sequence[float]) -> float:
    """The middle value, of two the smaller: a single late one never moves it."""
    return sorted(values)[(len(values) - 1) // 2]
