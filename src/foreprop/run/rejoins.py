"""``--nodes MIN:MAX``: which hosts of an elastic run are tried again, where and when.

A run begins with as many *places*, each with its ranks, as hosts begin it, and has up to MAX. A
host that fails leaves its place, and a host that is out takes one that is free: its own again, or
another of as many workers; or else a new one, whose ranks are the next ones.
Counted as by torchrun: a host's workers are started again at most ``--max-restarts`` times, and to
find that a host does not answer is no restart. Time is an argument: seconds of a clock of the
caller's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.run.resources import Host

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Pauses double up to this. A host that has worked for so long begins with the first one again."""
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")


class NodeRange(NamedTuple):
    """Of hosts at work: a run begins with, and goes on with, from ``least`` to ``most``."""

    least: int
    most: int


def parse_nodes(text: str, hosts: int) -> NodeRange:
    """MIN:MAX or one number, of so many hosts; raises `ConfigError`."""
    match = _RANGE.fullmatch(text.strip())
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not match or not least or not most:
        raise ConfigError(f"nodes is {text!r}; it must be MIN:MAX, two whole numbers, as 2:4")
    if least > most:
        raise ConfigError(f"nodes is {text!r}; the first number is the smaller one: {most}:{least}")
    if most > hosts:
        known = f"there {'is' if hosts == 1 else 'are'} {counted(hosts, 'host')}"
        raise ConfigError(
            f"nodes is {text!r}, and {known}; give at most {min(least, hosts)}:{hosts}, or name"
            " more hosts in --resources"
        )
    return NodeRange(least, most)


@dataclass(slots=True)
class _Known:
    """What is known of a host."""

    host: Host
    place: int | None
    """Its own, also while it is out of it."""
    pause_s: float = FIRST_PAUSE_S
    due_s: float = 0.0
    starts: int = 0
    """Of its workers."""
    started_s: float = 0.0
    is_out: bool = True


class Rejoins:
    """All hosts of the file, and the places of those that have begun."""

    def __init__(
        self, nodes: NodeRange, began: Sequence[Host], others: Sequence[Host], most_restarts: int
    ) -> None:
        """``others``: hosts that have not begun; the first that answers takes a place that is free,
        or a new one."""
        self.nodes = nodes
        self._workers = [host.workers for host in began]  # by place
        more = sorted((host.workers for host in others), reverse=True)[: nodes.most - len(began)]
        self.most_workers = sum(self._workers) + sum(more)
        """That there may be, whichever hosts come."""
        self._taken: set[int] = set()
        """The places where workers have ever been started."""
        self._most_restarts = most_restarts
        self._free_s: dict[int, float] = {}
        """By free place: the time from which on it may be taken."""
        self._known = {host.name: _Known(host, place) for place, host in enumerate(began)}
        self._known |= {host.name: _Known(host, None) for host in others}

    def start(self, name: str, now_s: float) -> None:
        """This host's workers are started."""
        known = self._known[name]
        known.is_out = False
        known.starts += 1
        known.started_s = now_s
        if known.place is not None:
            self._taken.add(known.place)

    @property
    def places(self) -> int:
        """So many have had workers."""
        return len(self._taken)

    def leave(self, name: str, place: int, now_s: float, *, gone_s: float = 0.0) -> None:
        """They have failed, and have ended, or will have in ``gone_s``: the place is free then."""
        known = self._known[name]
        if now_s - known.started_s >= LONGEST_PAUSE_S:
            known.pause_s = FIRST_PAUSE_S
        known.is_out = True
        self._free_s[place] = now_s + gone_s
        self._pause(known, now_s + gone_s)

    def miss(self, name: str, place: int, now_s: float) -> None:
        """The host that was to take this place did not answer, or could not start."""
        known = self._known[name]
        known.is_out = True
        self._pause(known, now_s)
        if place == len(self._workers) - 1 and place not in self._taken:
            del self._workers[place]  # another host's may have more workers, or fewer
            known.place = None
        else:
            self._free_s[place] = now_s

    def _pause(self, known: _Known, since_s: float) -> None:
        known.due_s = since_s + known.pause_s
        known.pause_s = min(2 * known.pause_s, LONGEST_PAUSE_S)

    def after_failure(self, name: str) -> str:
        """What becomes of a host that has failed, for a line to a person."""
        restarts = self._known[name].starts
        most = self._most_restarts
        if restarts <= most:
            return f"{name} is started again (restart {restarts} of {most})"
        return f"without {name}" + (f", after restart {most} of {most}" if most else "")

    def next_start(self, now_s: float) -> tuple[Host, int] | None:
        """A host to be tried now, and its place, which is taken by that; None if there is none."""
        for known in sorted(self._known.values(), key=lambda each: each.due_s):
            place = self._place_for(known, now_s) if known.due_s <= now_s else None
            if place is not None:
                if place == len(self._workers):
                    self._workers.append(known.host.workers)
                self._free_s.pop(place, None)
                known.is_out = False
                known.place = place
                return known.host, place
        return None

    def _place_for(self, known: _Known, now_s: float) -> int | None:
        """A free one, or the next new one; None if there is none, or it may not start again."""
        if not known.is_out or known.starts > self._most_restarts:
            return None
        fitting = [
            place
            for place, free_s in self._free_s.items()
            if free_s <= now_s and self._workers[place] == known.host.workers
        ]
        return known.place if known.place in fitting else min(fitting, default=self._new(known))

    def _new(self, known: _Known) -> int | None:
        """The next place, if there is room for the host."""
        has_room = sum(self._workers) + known.host.workers <= self.most_workers
        return len(self._workers) if has_room and len(self._workers) < self.nodes.most else None

    def next_due_s(self) -> float | None:
        """When `next_start` may have another answer than None; None if it depends on others."""
        times = [
            max(known.due_s, free_s)
            for known in self._known.values()
            for place, free_s in self._free_s.items()
            if self._place_for(known, free_s) is not None
        ]
        times += [
            known.due_s
            for known in self._known.values()
            if self._place_for(known, known.due_s) is not None
        ]
        return min(times, default=None)
