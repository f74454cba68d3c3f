"""The global gradient norm of the last steps, as one rank comes to know them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from foreprop.config import Config
from foreprop.core.norm import ZERO, SquareSum, decode_square_sums
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header
from foreprop.errors import RemoteProtocolError
from foreprop.path.progress import Progress

_LAYOUT = struct.Struct("!d")
_KEPT_STEPS = 3
NORM_BYTES = _LAYOUT.size


def encode_norm(norm: float) -> bytes:
    return _LAYOUT.pack(norm)


def decode_norm(header: Header, payload: bytes | memoryview) -> float:
    """Raises `RemoteProtocolError` for anything that is not the norm of some gradients."""
    if len(payload) != NORM_BYTES:
        raise RemoteProtocolError(f"a norm has {NORM_BYTES} bytes, got {len(payload)}")
    (norm,) = _LAYOUT.unpack(payload)
    if norm < 0:
        raise RemoteProtocolError(f"the norm of step {header.step} is {norm}")
    return float(norm)


class GradientNorms:
    """Noted by any thread, waited for by the training thread."""

    def __init__(self, progress: Progress, config: Config) -> None:
        self._progress = progress
        self._config = config
        self._by_step: dict[int, float] = {}

    def note(self, step: int, norm: float) -> None:
        kept = {s: n for s, n in self._by_step.items() if s > step - _KEPT_STEPS}
        self._by_step = {**kept, step: norm}
        self._progress.notify()

    def of(self, step: int, describe: Callable[[], str] = str) -> float:
        """Block until the step's norm is known; raises what went wrong meanwhile."""
        self._progress.wait_until(
            lambda: step in self._by_step,
            self._config.step_timeout_s,
            lambda: f"the gradient norm of step {step}{describe()}",
        )
        return self._by_step[step]


class MeasuredGradients:
    """What the servers tell of averaged gradients, round by round, each of its own slices.

    Noted by the receiving threads, one for each server; asked by the training thread.
    """

    def __init__(self, slices: Sequence[Slice], *, parameters: int) -> None:
        self._slices: dict[int, list[Slice]] = {}
        for piece in slices:
            self._slices.setdefault(piece.server, []).append(piece)
        self._parameters = parameters
        self._told: dict[int, list[list[SquareSum]]] = {server: [] for server in self._slices}
        self._first_round = dict.fromkeys(self._slices, 1)  # of those that are kept
        self._known: tuple[int, list[SquareSum]] = (0, [])

    def arrived(self, server: int, payload: bytes | memoryview) -> None:
        """Raises `RemoteProtocolError` for anything that cannot be a round's."""
        pieces = self._slices.get(server)
        if pieces is None:
            raise RemoteProtocolError(f"server {server} has no slices to measure")
        self._told[server].append(decode_square_sums(payload, count=len(pieces)))

    def has(self, round_: int) -> bool:
        return all(
            self._first_round[server] + len(told) > round_ for server, told in self._told.items()
        )

    def of(self, round_: int) -> Sequence[SquareSum]:
        """By parameter; earlier rounds are forgotten."""
        if self._known[0] != round_:
            sums = [ZERO] * self._parameters
            for server, pieces in self._slices.items():
                told = self._told[server]
                del told[: round_ - self._first_round[server]]
                self._first_round[server] = round_
                for piece, part in zip(pieces, told[0], strict=True):
                    sums[piece.parameter] = sums[piece.parameter].plus(part)
            self._known = (round_, sums)
        return self._known[1]
