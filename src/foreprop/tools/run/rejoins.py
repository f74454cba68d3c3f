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
from foreprop.tools.run.resources import Host

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Pauses double up to this. A host that has worked for so long begins with the first one again."""
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")


class NodeRange(NamedTuple):
    """Hosts at work: a run begins with, and goes on with, from ``least`` to ``most``."""

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
        there = f"there {'is' if hosts == 1 else 'are'} {counted(hosts, 'host')}"
        raise ConfigError(
            f"nodes is {text!r}, and {there}; give at most {min(least, hosts)}:{hosts}, or name"
            " more hosts in --resources"
        )
    return NodeRange(least, most)


@dataclass(slots=True)
class _HostState:
    host: Host
    place: int | None
    """The place that it has, or had before it failed."""
    pause_s: float = FIRST_PAUSE_S
    """How long the next pause is."""
    due_s: float = 0.0
    """When the host may be tried again."""
    starts: int = 0
    """How often its workers were started."""
    started_s: float = 0.0
    is_out: bool = True


class Rejoins:
    """All hosts of the file, those that begin the run and the others, and the places they have."""

    def __init__(
        self, nodes: NodeRange, began: Sequence[Host], others: Sequence[Host], most_restarts: int
    ) -> None:
        self.nodes = nodes
        self._workers = [host.workers for host in began]  # by place
        more = sorted((host.workers for host in others), reverse=True)[: nodes.most - len(began)]
        self.most_workers = sum(self._workers) + sum(more)
        """How many workers there may be, whichever hosts come."""
        self._taken: set[int] = set()
        """The places where workers have ever been started."""
        self._most_restarts = most_restarts
        self._free_s: dict[int, float] = {}
        """The time from which on a free place may be taken."""
        self._states = {host.name: _HostState(host, place) for place, host in enumerate(began)}
        self._states |= {host.name: _HostState(host, None) for host in others}

    def start(self, name: str, now_s: float) -> None:
        state = self._states[name]
        state.is_out = False
        state.starts += 1
        state.started_s = now_s
        if state.place is not None:
            self._taken.add(state.place)

    @property
    def places(self) -> int:
        return len(self._taken)

    def leave(self, name: str, place: int, now_s: float, *, gone_s: float = 0.0) -> None:
        """A host's workers have failed; in ``gone_s`` they have ended and the place is free."""
        state = self._states[name]
        if now_s - state.started_s >= LONGEST_PAUSE_S:
            state.pause_s = FIRST_PAUSE_S
        state.is_out = True
        self._free_s[place] = now_s + gone_s
        self._pause(state, now_s + gone_s)

    def miss(self, name: str, place: int, now_s: float) -> None:
        """The host that was to take this place did not answer, or could not start."""
        state = self._states[name]
        state.is_out = True
        self._pause(state, now_s)
        if place == len(self._workers) - 1 and place not in self._taken:
            del self._workers[place]  # another host's may have more workers, or fewer
            state.place = None
        else:
            self._free_s[place] = now_s

    def _pause(self, state: _HostState, since_s: float) -> None:
        state.due_s = since_s + state.pause_s
        state.pause_s = min(2 * state.pause_s, LONGEST_PAUSE_S)

    def after_failure(self, name: str) -> str:
        """What becomes of a host that has failed, for a line to a person."""
        restarts = self._states[name].starts
        most = self._most_restarts
        if restarts <= most:
            return f"{name} is started again (restart {restarts} of {most})"
        return f"without {name}" + (f", after restart {most} of {most}" if most else "")

    def next_start(self, now_s: float) -> tuple[Host, int] | None:
        """A host to try now, and its place, which it takes by that; None if there is none."""
        for state in sorted(self._states.values(), key=lambda each: each.due_s):
            place = self._place_for(state, now_s) if state.due_s <= now_s else None
            if place is not None:
                if place == len(self._workers):
                    self._workers.append(state.host.workers)
                self._free_s.pop(place, None)
                state.is_out = False
                state.place = place
                return state.host, place
        return None

    def _place_for(self, state: _HostState, now_s: float) -> int | None:
        """A free place or the next new one; None if there is none, or it may not start again."""
        if not state.is_out or state.starts > self._most_restarts:
            return None
        fitting = [
            place
            for place, free_s in self._free_s.items()
            if free_s <= now_s and self._workers[place] == state.host.workers
        ]
        if fitting:
            return state.place if state.place in fitting else min(fitting)
        has_room = sum(self._workers) + state.host.workers <= self.most_workers
        return len(self._workers) if has_room and len(self._workers) < self.nodes.most else None

    def next_due_s(self) -> float | None:
        """When `next_start` may have another answer than None; None if it depends on others."""
        times = [
            max(state.due_s, free_s)
            for state in self._states.values()
            for place, free_s in self._free_s.items()
            if self._place_for(state, free_s) is not None
        ]
        times += [
            state.due_s
            for state in self._states.values()
            if self._place_for(state, state.due_s) is not None
        ]
        return min(times, default=None)
