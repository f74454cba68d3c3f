"""The global gradient norm of the last steps, as one rank comes to know them."""

from __future__ import annotations

import struct
from collections.abc import Callable

from foreprop.config import Config
from foreprop.core.wire import Header
from foreprop.engine.progress import Progress
from foreprop.errors import RemoteProtocolError

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
