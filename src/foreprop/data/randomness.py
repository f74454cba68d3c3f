"""Random numbers that all ranks draw alike, in whatever way somebody's sampler draws them."""

from __future__ import annotations

import os
import random
import threading
from types import TracebackType
from typing import Any

import numpy as np
import torch

_SEEDS = 2**32  # as many as numpy takes

_turn = threading.RLock()


def _forget_turn() -> None:
    """A forked child would else wait for a thread that it does not have."""
    global _turn  # noqa: PLW0603 - the process's
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_forget_turn)


class CommonRandomness:
    """While entered, torch's, numpy's and Python's global generators draw from ``seed``.

    Entered again, they go on where they were left. Outside, nothing of it is seen. Costs about
    0.15 ms each time.
    """

    def __init__(self, seed: int) -> None:
        self._states: Any = _seeded(seed)
        self._outside: Any = None
        self._lock = _turn

    def reseed(self, seed: int) -> None:
        """From now on; to be called outside."""
        self._states = _seeded(seed)

    def __enter__(self) -> CommonRandomness:
        self._lock = _turn
        self._lock.acquire()
        self._outside = _states()
        _set_states(self._states)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._states = _states()
        _set_states(self._outside)
        self._lock.release()


def _seeded(seed: int) -> tuple[Any, Any, Any]:
    legacy = np.random.RandomState(seed % _SEEDS)  # what np.random.shuffle and its like draw from
    return (
        torch.Generator().manual_seed(seed).get_state(),
        legacy.get_state(legacy=False),
        random.Random(seed).getstate(),
    )


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
