"""Measures steps of the user's own training on one rank, array by array, while it trains.

Before a step that is watched all updates have come in, so the times are the device's and the
loop's, not the network's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch

from foreprop.core.codec import Place
from foreprop.engine.asyncdevice import HOSTS
from foreprop.engine.rendezvous import Board, decode_entry
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.lossless import Lossless
from foreprop.params.parameter import Parameter
from foreprop.plan.passes import Mark, PassRecord, attribute, clock_of
from foreprop.plan.profile import Profile
from foreprop.plan.profiler import profile_from

_MOST_ELEMS = 50_000
_LEAST_SHARE = 1e-3  # zeros take some bytes, too
_ANYWHERE = Place(0, 0, 0)


class LosslessProbe:
    """Measures the share of this training's bytes that the lossless codec keeps, by samples.

    A push is the gradient. A reply is an average, which keeps the same share as a gradient; where
    servers update it is the difference in bits between two values, or with ``raw_answers`` the
    values. Both ways have the same raw bytes, so their mean share counts. Samples are taken in the
    watched step ``at``, counted from 1.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        at: int,
        by_workers: bool = False,
        raw_answers: bool = False,
    ) -> None:
        self._by_workers, self._raw_answers = by_workers, raw_answers
        wide = [p for p in parameters if p.parameter.dtype == torch.float32]
        self._parameters = [p for p in wide if p.parameter.numel()]
        self._left = at
        self._before: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Note that a watched step begins, with all values in."""
        self._left -= 1
        if not self._left:
            self._before = {p.index: _sample(p.parameter) for p in self._parameters}

    def ready(self, parameter: Parameter) -> None:
        """Sample a parameter's gradient; of several passes the last one counts."""
        if parameter.index not in self._before:
            return
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.parameter.grad
        if gradient is not None and gradient.layout == torch.strided:
            self._gradients[parameter.index] = _sample(gradient)

    def shares(self) -> dict[str, float]:
        """The shares by name, once the step's new values are in, of parameters with a gradient."""
        codec = Lossless()
        return {
            p.name: self._share(codec, p) for p in self._parameters if p.index in self._gradients
        }

    def _share(self, codec: Lossless, p: Parameter) -> float:
        crossing = [self._gradients[p.index].cpu()]
        if self._raw_answers:
            crossing.append(_sample(p.parameter).cpu())
        elif not self._by_workers:
            before, now = self._before[p.index], _sample(p.parameter)
            moved = before.cpu().view(torch.int32) ^ now.cpu().view(torch.int32)
            crossing.append(moved.view(torch.float32))
        left_bytes = raw_bytes = 0
        for values in crossing:
            raw_bytes += values.nbytes
            left_bytes += min(values.nbytes, len(codec.encode(values, {}, _ANYWHERE)))
        return max(_LEAST_SHARE, left_bytes / raw_bytes)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of neighbours from the middle, as a slice has them, on the tensor's device."""
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.detach().reshape(-1)
        start = max(0, (flat.numel() - _MOST_ELEMS) // 2)
        return flat[start : start + _MOST_ELEMS].clone()


class StepProbe:
    """Notes first uses and gradients of the session's parameters, step by step.

    Steps are as in `plan.passes`: of several backward passes all but the last count as forward
    time. What the loop does beside them, as loading data, counts as computing before the first use.
    """

    def __init__(
        self, parameters: Sequence[Parameter], lossless: LosslessProbe | None = None
    ) -> None:
        self.records: list[PassRecord] = []
        self.lossless = lossless
        self._parameters = list(parameters)
        devices = {parameter.parameter.device for parameter in parameters}
        beside = [device for device in devices if device.type not in HOSTS]
        self._clock = clock_of((beside or list(devices))[0])
        self._began: Mark = None
        self._asked: dict[int, Mark] = {}
        self._used: dict[int, Mark] = {}
        self._ready: dict[int, Mark] = {}

    @property
    def watches(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        self._asked, self._used, self._ready = {}, {}, {}
        if self.lossless is not None:
            self.lossless.begin()
        for parameter in self._parameters:
            parameter.watch()
        self._clock.settle()
        self._began = self._clock.mark()

    def asked(self, parameter: Parameter) -> None:
        """Note that an operation with a parameter begins; `used` follows if that was a use."""
        if self.watches:
            self._asked[parameter.index] = self._clock.mark()

    def used(self, parameter: Parameter) -> None:
        if self.watches and parameter.index in self._asked:
            self._used.setdefault(parameter.index, self._asked[parameter.index])

    def ready(self, parameter: Parameter) -> None:
        if self.watches:
            self._ready[parameter.index] = self._clock.mark()  # of several passes the last one
            if self.lossless is not None:
                self.lossless.ready(parameter)

    def end(self) -> None:
        """Note that ``optimizer.step()`` was called."""
        if not self.watches:
            return
        began, ended = self._began, self._clock.mark()
        self._began = None
        self._clock.settle()
        for parameter in self._parameters:
            parameter.unwatch()
        seconds = self._clock.seconds
        used_s = {number: seconds(began, mark) for number, mark in self._used.items()}
        # between the last first use and the first gradient nothing is sent or waited for, so it
        # does not matter where in it the backward pass is said to begin
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
        """The medians of the steps as a profile; None if no step gave a gradient.

        ``shares`` has by name the share of touched rows of tables that are sent by rows.
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
    """Counts the rows that this rank's gradients touch, step by step."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = list(parameters)
        self._shares: dict[str, list[float]] = {p.name: [] for p in self._parameters}
        for parameter in self._parameters:
            parameter.counts_rows = True

    def end_step(self) -> None:
        for parameter in self._parameters:
            rows = max(1, len(parameter.parameter))
            self._shares[parameter.name].append(parameter.touched_rows / rows)

    def end(self) -> dict[str, float]:
        """Stop counting; returns the mean share of each parameter's rows that a step touched."""
        for parameter in self._parameters:
            parameter.counts_rows = False
        return {name: statistics.fmean(shares) for name, shares in self._shares.items()}


def agree_on_shares(mine: Mapping[str, float], board: Board) -> dict[str, float]:
    """The mean shares over all ranks, the same on each."""
    texts = board.exchange("shares", json.dumps(mine), "shares of touched rows")
    found: list[dict[str, float]] = [
        decode_entry(text, dict[str, float], "shares of touched rows") for text in texts
    ]
    if any(mine.keys() - each.keys() for each in found):
        raise RemoteProtocolError("the ranks have counted touched rows of different parameters")
    return {name: statistics.fmean(shares[name] for shares in found) for name in mine}
