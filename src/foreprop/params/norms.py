"""The norms of gradients that a rank has been told, by step, and how a norm crosses.

Where the workers update, servers do not wait for a norm: they tell the sums of squares of averaged
gradients, round by round (`MeasuredGradients`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from foreprop.config import Config
from foreprop.core.norm import ZERO, SquareSum, decode_square_sums
from foreprop.core.slicing import Packs, Slice
from foreprop.core.wire import Header
from foreprop.engine.progress import Progress
from foreprop.errors import RemoteProtocolError

_LAYOUT = struct.Struct("!d")
_KEPT_STEPS = 3
"""Norms are kept for so many steps before the rank's own; others may be ahead."""
NORM_BYTES = _LAYOUT.size


def encode_norm(norm: float) -> bytes:
    return _LAYOUT.pack(norm)


def decode_norm(header: Header, payload: bytes | memoryview) -> float:
    if len(payload) != NORM_BYTES:
        raise RemoteProtocolError(f"a norm has {NORM_BYTES} bytes, got {len(payload)}")
    (norm,) = _LAYOUT.unpack(payload)
    if norm < 0:
        raise RemoteProtocolError(f"the norm of step {header.step} is {norm}")
    return float(norm)


class GradientNorms:
    """The norms of the last steps. Noted by any thread, waited for by the training thread.

    ``made``: how many steps the rank has made, if others may be ahead of it.
    """

    def __init__(
        self, progress: Progress, config: Config, made: Callable[[], int] | None = None
    ) -> None:
        self._progress = progress
        self._config = config
        self._made = made
        self._by_step: dict[int, float] = {}

    def note(self, step: int, norm: float) -> None:
        own = step if self._made is None else min(step, self._made())
        kept = {s: n for s, n in self._by_step.items() if s > own - _KEPT_STEPS}
        self._by_step = {**kept, step: norm}
        self._progress.notify()

    def of(self, step: int) -> float:
        """Block until the step's norm is known; raises what went wrong meanwhile."""
        self._progress.wait_until(
            lambda: step in self._by_step,
            self._config.step_timeout_s,
            lambda: f"the gradient norm of step {step}",
        )
        return self._by_step[step]


class MeasuredGradients:
    """The sums of squares of averaged gradients that servers tell, each of its own slices.

    Noted by the receiving threads, one for each server; asked by the training thread.
    """

    def __init__(self, slices: Sequence[Slice], packs: Packs, *, parameters: int) -> None:
        self._measured: dict[int, list[int]] = {}  # by server: which parameters it tells of
        pack_of = {pack[0]: pack for pack in packs}
        for piece in slices:
            numbers = pack_of.get(piece.parameter, (piece.parameter,))
            self._measured.setdefault(piece.server, []).extend(numbers)
        self._parameters = parameters
        self._told: dict[int, list[list[SquareSum]]] = {server: [] for server in self._measured}
        self._first_round = dict.fromkeys(self._measured, 1)  # of those that are kept
        self._known: tuple[int, list[SquareSum]] = (0, [])

    def arrived(self, server: int, payload: bytes | memoryview) -> None:
        numbers = self._measured.get(server)
        if numbers is None:
            raise RemoteProtocolError(f"server {server} has no slices to measure")
        self._told[server].append(decode_square_sums(payload, count=len(numbers)))

    def has(self, round_: int) -> bool:
        return all(
            self._first_round[server] + len(told) > round_ for server, told in self._told.items()
        )

    def of(self, round_: int) -> Sequence[SquareSum]:
        """Each parameter's sum; earlier rounds are forgotten."""
        if self._known[0] != round_:
            sums = [ZERO] * self._parameters
            for server, numbers in self._measured.items():
                told = self._told[server]
                del told[: round_ - self._first_round[server]]
                self._first_round[server] = round_
                for number, part in zip(numbers, told[0], strict=True):
                    sums[number] = sums[number].plus(part)
            self._known = (round_, sums)
        return self._known[1]
