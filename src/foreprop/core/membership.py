"""The members of a session as one server knows them, and a log of whose pushes it has counted.

Theory of operation. A server closes a slice of a step when its *counted set* is complete: the
pushes of all members, or, with b backup workers, the first N - b (Chen et al., Revisiting
Distributed Synchronous SGD, 2016, section 3). A member that dies is *dropped*: what it has pushed
still counts, and nothing else is awaited from it. A worker that comes in a lost one's place counts
from a step on that all servers agree to (`core.newcomers`). So does a worker that comes for the
first time: ranks that are absent at the start count as if they had been lost before.

The counted sets can be written down as lines (`CountedLog`), and a session that reads them counts
the same sets again (`CountedReplay`). The log has a line only where a set differs from the set of
the step before.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from foreprop.errors import ConfigError, RemoteProtocolError


# Events.
class PeerDropped(NamedTuple):
    """A member is lost, and the session goes on without it."""

    rank: int


# Instructions.
class MemberLeft(NamedTuple):
    """Tell all members that one is lost, which has last pushed anything of ``step``.

    Of that step's ``slices`` so many have ``counted`` it.
    """

    rank: int
    step: int
    counted: int
    slices: int


class Members:
    """One server's workers, of which each slice may be closed without so many ``backups``.

    There may be ``workers`` ranks; the first ``started`` are here at the start, by default all.
    """

    def __init__(self, workers: int, *, backups: int = 0, started: int | None = None) -> None:
        if not 0 <= backups < max(workers, 1):
            raise ConfigError(
                f"backup_workers is {backups}, and must be below the number of workers, {workers}:"
                " somebody has to count"
            )
        self.workers = workers
        self.backups = backups
        self.started = frozenset(range(workers if started is None else started))
        self.here = set(self.started)  # all that have come, and have not been dropped
        self.ever = set(self.here)  # all that have come
        self.left: set[int] = set()  # those here that have said goodbye
        self.since: dict[int, int] = {}
        """The first step that waits for a member, for each that has come later."""
        self.promised: dict[int, int] = {}
        """The first step of each that asks to join, until that is settled."""

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.workers:
            raise RemoteProtocolError(f"rank {rank} of a world of {self.workers}")

    def drop(self, rank: int) -> None:
        self.here.discard(rank)
        self.left.discard(rank)
        self.since.pop(rank, None)
        self.promised.pop(rank, None)

    def of_step(self, step: int) -> set[int]:
        """The members whose pushes a slice of this step waits for, or for the first of them."""
        if not self.since:
            return self.here
        return {rank for rank in self.here if self.since.get(rank, 0) <= step}

    def had_values_before(self, rank: int, first: int) -> bool:
        """Whether a member has taken part in steps before this one."""
        return rank in self.here and self.since.get(rank, 0) < first

    def coming_at(self, first: int) -> list[int]:
        """The newcomers for which it is settled that they count from this step on."""
        return [r for r, since in self.since.items() if since == first and r not in self.promised]

    @property
    def settled(self) -> set[int]:
        return self.here - self.promised.keys()

    @property
    def all_left(self) -> bool:
        return self.left == self.here

    def may_close(self, step: int, counted: int, missing: Collection[int]) -> bool:
        """Whether a slice closes with so many pushes, while ``missing`` members have not pushed.

        A newcomer is no backup in its first step, or before that is settled: what it is sent must
        not change before it has all.
        """
        if not missing or not self.backups:
            return not missing
        if any(self.since.get(rank) == step for rank in missing):
            return False
        return counted >= max(1, len(self.of_step(step)) - self.backups)


def is_quorum(some: Collection[int], of: Collection[int], dead: Collection[int]) -> bool:
    """Whether ``some`` may go on without the others, which may live and be out of reach.

    They must be more than half of those not known to be ``dead``, or exactly half and have the
    lowest rank: of two halves that cannot reach each other at most one goes on.
    """
    alive = set(of) - set(dead)
    inside = alive & set(some)
    return 2 * len(inside) > len(alive) or (
        2 * len(inside) == len(alive) > 0 and min(alive) in inside
    )


# The log of counted sets.
HEAD = "foreprop counted sets 1"
_HEAD = re.compile(HEAD + r": (?:(\d{1,9}) to )?(\d{1,9}) workers, (\d{1,9}) slices", re.ASCII)
_LEFT = "left"
_NUMBERS = r"\d{1,9}(?:,\d{1,9})*"
_LINE = re.compile(
    rf"(?P<step>\d{{1,18}}) (?:{_LEFT} (?P<left>{_NUMBERS})"
    rf"|(?P<first>\d{{1,9}}) (?P<last>\d{{1,9}}) (?P<ranks>{_NUMBERS}|-))",
    re.ASCII,
)


class CountedLog:
    """Writes down from which step on the counted set of one of the server's ``slices`` changes.

    A line is ``step first last ranks``: from that step on, the server's slices with numbers from
    ``first`` to ``last`` count these ranks, until another line says otherwise. At the start those
    are counted that have started. A line ``step left rank`` says that a rank has left, within the
    last step that it has pushed any of the slices for. ``workers`` and ``started`` are those of
    `Members`. A log that ``goes_on`` writes every slice's first set: another server had it before.
    """

    def __init__(
        self,
        workers: int,
        slices: Sequence[int],
        *,
        started: int | None = None,
        goes_on: bool = False,
    ) -> None:
        self._workers = workers
        self._started = workers if started is None else started
        self._slices = sorted(slices)
        self._last: dict[int, tuple[int, ...]] = {}
        self._changes: dict[int, dict[int, tuple[int, ...]]] = {}  # by step and slice, unwritten
        self._everybody = () if goes_on else tuple(range(self._started))
        self.uncounted = 0  # how many slices, of all steps, have not counted all workers

    def head(self) -> str:
        least = "" if self._started == self._workers else f"{self._started} to "
        return f"{HEAD}: {least}{self._workers} workers, {len(self._slices)} slices"

    def note(self, slice_: int, step: int, counted: tuple[int, ...]) -> list[str]:
        """Note a counted set; returns the lines of the steps that are complete by now."""
        if len(counted) < self._workers:
            self.uncounted += 1
        if counted != self._last.get(slice_, self._everybody):
            self._last[slice_] = counted
            self._changes.setdefault(step, {})[slice_] = counted
        # no slice is two steps behind another
        return self._lines(step - 2) if self._changes else []

    def note_anew(self, slice_: int) -> None:
        """Write the slice's next set, whatever it is: another server has had the slice."""
        self._last[slice_] = ()

    def left(self, rank: int, step: int) -> list[str]:
        return [f"{step} {_LEFT} {rank}"] if self._slices else []

    def rest(self) -> list[str]:
        """The lines that are not written yet."""
        return self._lines(max(self._changes, default=0))

    def _lines(self, last_step: int) -> list[str]:
        lines = []
        for step in sorted(step for step in self._changes if step <= last_step):
            changed = self._changes.pop(step)
            run: list[int] = []
            for slice_ in [*self._slices, -1]:
                ranks = changed.get(slice_)
                if run and ranks != changed[run[0]]:
                    named = ",".join(map(str, changed[run[0]])) or "-"
                    lines.append(f"{step} {run[0]} {run[-1]} {named}")
                    run = []
                if ranks is not None:
                    run.append(slice_)
        return lines


class CountedReplay:
    """The counted sets that one server's `CountedLog` has; `ConfigError` if it does not fit.

    There are as many ``workers`` as the session had; or, if it could grow, as many as have come.
    """

    def __init__(self, lines: Iterable[str], workers: int, slices: Sequence[int]) -> None:
        self._steps: dict[int, list[int]] = {}
        self._sets: dict[int, list[tuple[int, ...]]] = {}
        self._workers = range(workers)
        self.left: dict[int, int] = {}  # the step within which each rank has left that has
        first, *rest = [line.strip() for line in lines if line.strip()] or [""]
        self._everybody = tuple(range(_started_in(first, workers, slices)))
        for line in rest:
            self._read(line, sorted(slices))

    def _read(self, line: str, slices: Sequence[int]) -> None:
        if not (found := _LINE.fullmatch(line)):
            raise ConfigError(f"counted_replay: {line[:80]!r} is no line of a log")
        step, named = int(found["step"]), found["left"] or found["ranks"]
        begin, end = int(found["first"] or 0), int(found["last"] or -1)
        counted = () if named == "-" else tuple(map(int, named.split(",")))
        if not set(counted) <= set(self._workers) or list(counted) != sorted(set(counted)):
            raise ConfigError(f"counted_replay: {line[:80]!r} counts ranks that there are not")
        if found["left"]:
            self.left |= dict.fromkeys(counted, step)
        for slice_ in slices:
            if begin <= slice_ <= end:
                if step < (self._steps.get(slice_) or [0])[-1]:
                    raise ConfigError(f"counted_replay: {line[:80]!r} is of an earlier step")
                self._steps.setdefault(slice_, []).append(step)
                self._sets.setdefault(slice_, []).append(counted)

    def at(self, slice_: int, step: int) -> tuple[int, ...]:
        steps = self._steps.get(slice_)
        place = 0 if steps is None else bisect_right(steps, step)
        return self._sets[slice_][place - 1] if place else self._everybody


def _started_in(head: str, workers: int, slices: Sequence[int]) -> int:
    """How many ranks the log's session began with; `ConfigError` for another session's log."""
    found = _HEAD.fullmatch(head)
    most = int(found[2]) if found else 0
    started = int(found[1] or most) if found else 0
    if not found or not started <= workers <= most or int(found[3]) != len(slices):
        expected = CountedLog(workers, slices).head()
        raise ConfigError(f"counted_replay: the log begins with {head!r}, not {expected!r}")
    return started
