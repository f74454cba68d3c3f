"""What a step of the user's own training costs on one rank, array by array, while it trains.

Before a step that is watched all updates have come in, so what is measured is the device's time
and the user's loop, not the network's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from foreprop.auto.attribution import PassRecord, attribute
from foreprop.auto.passes import Clock, Mark, clock_of
from foreprop.auto.profiler import profile_from
from foreprop.cluster.rendezvous import Board
from foreprop.path.asyncdevice import HOSTS
from foreprop.workload.profile import Profile

if TYPE_CHECKING:
    from foreprop.path.managedparameter import Watched


class StepProbe:
    """Notes first uses and gradients of the session's parameters, step by step.

    One forward and backward pass is a pass as `auto.attribution` has it. Of several per step
    all but the last backward pass count as forward time, as no gradient is complete before it.
    What the loop does beside them (loading data, say) counts as computing before the first use.
    """

    def __init__(self, parameters: Sequence[Watched]) -> None:
        self.records: list[PassRecord] = []
        self._parameters = list(parameters)
        self._clock = _clock_for(parameters)
        self._began: Mark = None
        self._asked: dict[int, Mark] = {}
        self._used: dict[int, Mark] = {}
        self._ready: dict[int, Mark] = {}

    @property
    def watches(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        """The step before is made, and its updates are in."""
        self._asked, self._used, self._ready = {}, {}, {}
        for parameter in self._parameters:
            parameter.watch()
        self._clock.settle()
        self._began = self._clock.mark()

    def asked(self, parameter: Watched) -> None:
        """An operation with it is about to begin; `used` tells whether it was a use."""
        if self.watches:
            self._asked[parameter.index] = self._clock.mark()

    def used(self, parameter: Watched) -> None:
        if self.watches and parameter.index in self._asked:
            self._used.setdefault(parameter.index, self._asked[parameter.index])

    def ready(self, parameter: Watched) -> None:
        if self.watches:
            self._ready[parameter.index] = self._clock.mark()  # of several passes the last one

    def end(self) -> None:
        """`optimizer.step()` has been called."""
        if not self.watches:
            return
        began, ended = self._began, self._clock.mark()
        self._began = None
        self._clock.settle()
        for parameter in self._parameters:
            parameter.unwatch()
        seconds = self._clock.seconds
        used_s = {number: seconds(began, mark) for number, mark in self._used.items()}
        # Between the last first use and the first gradient nothing is sent or waited for, so it
        # does not matter where in it the backward pass is said to begin.
        turned_s = max(used_s.values(), default=0.0)
        self.records.append(
            PassRecord(
                forward_s=turned_s,
                backward_s=max(0.0, seconds(began, ended) - turned_s),
                used_s=dict(sorted(used_s.items(), key=lambda entry: entry[1])),
                ready_s={n: seconds(began, mark) - turned_s for n, mark in self._ready.items()},
            )
        )

    def profile(self, name: str, shares: Mapping[str, float]) -> Profile | None:
        """Medians of the steps; ``shares`` of touched rows, of those that are sent by rows.

        None if no step gave a gradient.
        """
        found = attribute(
            self.records,
            forward_s=statistics.median(record.forward_s for record in self.records),
            backward_s=statistics.median(record.backward_s for record in self.records),
        )
        if not found.order:
            return None
        named = [(parameter.name, parameter.parameter) for parameter in self._parameters]
        numbered = {n: shares[own] for n, (own, _) in enumerate(named) if own in shares}
        return profile_from(found, named, numbered, name=name)


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


def _clock_for(parameters: Sequence[Watched]) -> Clock:
    devices = {parameter.parameter.device for parameter in parameters}
    beside = [device for device in devices if device.type not in HOSTS]
    return clock_of((beside or list(devices))[0])
